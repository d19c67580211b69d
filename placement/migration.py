"""Migration: the rounds of copies that lead from one placement to another.

Copy, commit, drop. The rounds copy what is missing while the base epoch serves; when all rounds are done, every rank
switches to the target epoch at one step boundary; only then are `drops` freed. So no copy of any expert is lost before
the commit, and since the target holds every expert, none is lost after it. A change of row within a rank is no copy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import ExpertId, Placement, Slot
from placement.errors import PlacementError
from placement.topology import Topology

DEFAULT_MAX_PAIR_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy one expert's weights to another rank. source is its slot in the base, target its slot in the target."""

    expert: ExpertId
    source: Slot
    target: Slot

    def __post_init__(self) -> None:
        if self.source.rank == self.target.rank:
            raise PlacementError(f"{self.expert} already lives on rank {self.target.rank}")


Round = tuple[Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """rounds, in order; in a round every rank exchanges experts with one peer at most. drops[rank]: freed after commit.

    expert_bytes: the weights of one expert of one layer.
    """

    base_epoch: int
    target_epoch: int
    expert_bytes: int
    rounds: tuple[Round, ...]
    drops: tuple[tuple[ExpertId, ...], ...]

    def __post_init__(self) -> None:
        if self.target_epoch <= self.base_epoch:
            raise PlacementError(f"the target epoch {self.target_epoch} must be above the base epoch {self.base_epoch}")
        if self.expert_bytes < 1:
            raise PlacementError(f"expert_bytes must be 1 or more, got {self.expert_bytes}")
        arrivals = [(move.expert, move.target.rank) for step in self.rounds for move in step]
        if len(set(arrivals)) < len(arrivals):
            raise PlacementError("an expert is copied twice to one rank")
        for number, step in enumerate(self.rounds):
            _check_one_peer(step, number)

    @property
    def num_moves(self) -> int:
        return sum(len(step) for step in self.rounds)

    @property
    def num_bytes(self) -> int:
        """Bytes that cross links, over all rounds."""
        return self.num_moves * self.expert_bytes


def _check_one_peer(step: Round, number: int) -> None:
    peer: dict[int, int] = {}
    for move in step:
        for one, other in ((move.source.rank, move.target.rank), (move.target.rank, move.source.rank)):
            if peer.setdefault(one, other) != other:
                raise PlacementError(f"round {number}: rank {one} has two peers, {peer[one]} and {other}")


def plan_migration(
    base: Placement,
    target: Placement,
    topology: Topology,
    expert_bytes: int,
    *,
    max_pair_bytes: int = DEFAULT_MAX_PAIR_BYTES,
) -> MigrationPlan:
    """Plan the copies that turn base into target, and the drops that follow the commit.

    Every expert that a rank holds in target and not in base is copied to it once, from the nearest holder in base (most
    levels of the topology shared), then the one with the least to do so far, then the lowest rank. In a round a pair of
    ranks sends at most max_pair_bytes each way (always at least one expert). The same input gives the same plan.
    Raises PlacementError where layers, experts or ranks differ, or the target's epoch is not above the base's.
    """
    _check_same_model(base, target, topology)
    held, wanted = base.copies_per_rank() > 0, target.copies_per_rank() > 0
    moves = _choose_sources(held, wanted & ~held, base, target, topology)
    dropped = held & ~wanted
    return MigrationPlan(
        base_epoch=base.epoch,
        target_epoch=target.epoch,
        expert_bytes=expert_bytes,
        rounds=into_rounds(moves, max(1, max_pair_bytes // max(1, expert_bytes))),
        drops=tuple(
            tuple(ExpertId(int(layer), int(expert)) for layer, expert in np.argwhere(dropped[:, rank]))
            for rank in range(base.num_ranks)
        ),
    )


def _check_same_model(base: Placement, target: Placement, topology: Topology) -> None:
    for what, one, other in (
        ("layers", base.num_layers, target.num_layers),
        ("experts per layer", base.num_experts, target.num_experts),
        ("ranks", base.num_ranks, target.num_ranks),
        ("ranks", base.num_ranks, topology.num_ranks),
    ):
        if one != other:
            raise PlacementError(f"cannot migrate from {one} {what} to {other}: both placements must be of one model")


def _slot_table(placement: Placement) -> NDArray[np.intp]:
    """[L, R, E]: the row in which a rank holds an expert; 0 where it does not hold it."""
    rows = np.zeros((placement.num_layers, placement.num_ranks, placement.num_experts), np.intp)
    layer, slot = np.nonzero(placement.physical_to_logical >= 0)
    rank, row = np.divmod(slot, placement.rows_per_rank)
    rows[layer, rank, placement.physical_to_logical[layer, slot]] = row
    return rows


def shared_levels(topology: Topology) -> NDArray[np.intp]:
    """[R, R]: how many levels of the tree two ranks have in common; links[that] is the slowest link between them."""
    near: NDArray[np.intp] = (topology.groups[:, :, None] == topology.groups[:, None, :]).sum(axis=0)
    return near


def _choose_sources(
    held: NDArray[np.bool_], missing: NDArray[np.bool_], base: Placement, target: Placement, topology: Topology
) -> list[Move]:
    """held, missing: [L, R, E]. One move for each missing one, those with the fewest holders to choose from first."""
    base_row, target_row = _slot_table(base), _slot_table(target)
    arrivals = np.argwhere(missing)
    num_holders = held.sum(axis=1)
    order = np.argsort(num_holders[arrivals[:, 0], arrivals[:, 2]], kind="stable")
    near = shared_levels(topology)
    busy = missing.sum(axis=(0, 2))
    moves = []
    for layer, rank, expert in arrivals[order].tolist():
        holders = np.flatnonzero(held[layer, :, expert])
        source = min(holders.tolist(), key=lambda holder: (-near[rank, holder], busy[holder], holder))
        busy[source] += 1
        moves.append(
            Move(
                expert=ExpertId(layer, expert),
                source=Slot(source, int(base_row[layer, source, expert])),
                target=Slot(rank, int(target_row[layer, rank, expert])),
            )
        )
    return moves


def into_rounds(moves: list[Move], max_moves_each_way: int) -> tuple[Round, ...]:
    """Match ranks into pairs, round by round, the pairs whose ranks have the most rounds still before them first."""
    ways: dict[tuple[int, int], deque[Move]] = {}
    for move in sorted(moves, key=lambda move: (move.expert, move.target)):
        ways.setdefault((move.source.rank, move.target.rank), deque()).append(move)
    pairs = sorted({(min(way), max(way)) for way in ways})
    num_left: dict[int, int] = {}
    waiting: dict[tuple[int, int], int] = {}
    for one, other in pairs:
        longest = max(len(ways.get((one, other), ())), len(ways.get((other, one), ())))
        waiting[one, other] = -(-longest // max_moves_each_way)
        for rank in (one, other):
            num_left[rank] = num_left.get(rank, 0) + waiting[one, other]
    rounds = []
    while waiting:
        chosen = _match(waiting, num_left)
        rounds.append(
            tuple(
                way.popleft()
                for one, other in chosen
                for way in (ways.get((one, other), deque()), ways.get((other, one), deque()))
                for _ in range(min(len(way), max_moves_each_way))
            )
        )
        for one, other in chosen:
            num_left[one] -= 1
            num_left[other] -= 1
            waiting[one, other] -= 1
            if not waiting[one, other]:
                del waiting[one, other]
    return tuple(rounds)


def _match(waiting: dict[tuple[int, int], int], num_left: dict[int, int]) -> list[tuple[int, int]]:
    """Disjoint pairs of ranks: greedily, the pair with the busiest rank first."""

    def urgency(pair: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
        lighter, heavier = sorted((num_left[pair[0]], num_left[pair[1]]))
        return -heavier, -lighter, pair

    chosen: list[tuple[int, int]] = []
    taken: set[int] = set()
    for pair in sorted(waiting, key=urgency):
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return chosen
