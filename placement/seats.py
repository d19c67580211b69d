"""Seats: which of the configured ranks take part, and what placement and copies that asks for.

A cluster is configured with a topology of so many seats. Ranks die, are drained and come back, so that at any time some
of the seats are taken; those that serve together are numbered 0, 1, 2, ... in the order of their seats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import ExpertId, Placement, Slot
from placement.elastic import place_with_joined, place_without
from placement.errors import PlacementError
from placement.migration import Move, Round, into_rounds, shared_levels
from placement.relevel import relevel
from placement.topology import Topology


def topology_of(full: Topology, seats: Sequence[int]) -> Topology:
    """The tree of the seats that are taken, ranks and groups numbered anew. Raises PlacementError for unknown seats."""
    if not seats or sorted(set(seats)) != list(seats) or seats[0] < 0 or seats[-1] >= full.num_ranks:
        raise PlacementError(f"seats {list(seats)} must be some of 0..{full.num_ranks - 1}, in order")
    kept = full.groups[:, list(seats)]
    groups = np.stack([np.unique(level, return_inverse=True)[1] for level in kept]).astype(np.int32)
    return Topology(name=full.name, levels=full.levels, groups=groups, links=full.links, device=full.device)


def carry_over(
    base: Placement,
    base_seats: Sequence[int],
    seats: Sequence[int],
    load: NDArray[np.float64],
    *,
    most_rows: int,
) -> Placement:
    """The base placement for other seats: who stays keeps its experts, the homeless get slots, new ranks a share.

    load [L, E]. rows_per_rank grows where that is needed to hold every expert, up to most_rows. Raises PlacementError
    where even that is too little.
    """
    joined = [seat for seat in seats if seat not in base_seats]
    lost = frozenset(rank for rank, seat in enumerate(base_seats) if seat not in seats)
    placement = place_with_joined(base, len(joined))
    numbered = [*base_seats, *joined]
    if lost:
        rows = max(base.rows_per_rank, -(-base.num_experts // len(seats)))
        if rows > most_rows:
            raise PlacementError(
                f"{len(seats)} ranks need {rows} rows a layer to hold {base.num_experts} experts, but their host slabs "
                f"have room for {most_rows}; raise workers.host_slab_rows, or bring a rank back"
            )
        placement = place_without(placement, lost, load, rows_per_rank=rows).placement
        numbered = [seat for rank, seat in enumerate(numbered) if rank not in lost]
    order = [numbered.index(seat) for seat in seats]
    table = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1)[:, order]
    placement = Placement(
        epoch=base.epoch + 1,
        num_ranks=len(seats),
        num_experts=base.num_experts,
        physical_to_logical=table.reshape(placement.num_layers, -1),
    )
    if not joined:
        return placement
    share = placement.num_layers * len(joined) * placement.rows_per_rank
    return relevel(placement, load, most_copies=2 * share)


def empty_seats(
    base: Placement, base_seats: Sequence[int], staying: Sequence[int], load: NDArray[np.float64], *, most_rows: int
) -> Placement:
    """The base placement on the same ranks, with nothing on those whose seats do not stay. See `carry_over`."""
    shrunk = carry_over(base, base_seats, staying, load, most_rows=most_rows)
    table = np.full((base.num_layers, len(base_seats), shrunk.rows_per_rank), -1, np.int32)
    ranks = [list(base_seats).index(seat) for seat in staying]
    table[:, ranks] = shrunk.physical_to_logical.reshape(base.num_layers, len(staying), -1)
    return Placement(
        epoch=shrunk.epoch,
        num_ranks=len(base_seats),
        num_experts=base.num_experts,
        physical_to_logical=table.reshape(base.num_layers, -1),
    )


def uses_every_rank(placement: Placement) -> bool:
    """Whether each rank holds an expert. One that is to be drained does not."""
    return bool((placement.copies_per_rank().sum(axis=(0, 2)) > 0).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """How ranks get what a placement gives them and they lack.

    rounds: copies between ranks, each with one peer at most in a round. restore[rank]: from the checkpoint.
    keep[rank]: what may not be freed before all is done, since it is needed there or copied from there.
    """

    rounds: tuple[Round, ...]
    restore: tuple[frozenset[ExpertId], ...]
    keep: tuple[frozenset[ExpertId], ...]


def plan_fetch(
    target: Placement,
    held: Sequence[frozenset[ExpertId]],
    topology: Topology,
    *,
    checkpoint_bandwidth: float = 0.0,
    max_moves_each_way: int = 1024,
) -> Fetch:
    """From the nearest rank that holds an expert, or from the checkpoint where that is nearer, or none holds it.

    held[rank]: the experts in its host memory. checkpoint_bandwidth: bytes/s from the checkpoint to a rank: it is
    nearer than a rank behind a slower link.
    """
    near = shared_levels(topology)
    bandwidths = np.array([link.bandwidth for link in topology.links])
    holders: dict[ExpertId, list[int]] = {}
    for rank, experts in enumerate(held):
        for expert in experts:
            holders.setdefault(expert, []).append(rank)
    sent = [0] * target.num_ranks
    moves: list[Move] = []
    restore: list[frozenset[ExpertId]] = []
    keep = [set(target.experts_on(rank)) for rank in range(target.num_ranks)]
    for rank in range(target.num_ranks):
        from_checkpoint = set()
        for expert in sorted(target.experts_on(rank) - held[rank]):
            sources = sorted(holders.get(expert, []), key=lambda source: (-near[rank, source], sent[source], source))
            if not sources or bandwidths[near[rank, sources[0]]] < checkpoint_bandwidth:
                from_checkpoint.add(expert)
                continue
            sent[sources[0]] += 1
            keep[sources[0]].add(expert)
            moves.append(Move(expert=expert, source=Slot(sources[0], 0), target=Slot(rank, 0)))
        restore.append(frozenset(from_checkpoint))
    return Fetch(
        rounds=into_rounds(moves, max_moves_each_way),
        restore=tuple(restore),
        keep=tuple(frozenset(experts) for experts in keep),
    )
