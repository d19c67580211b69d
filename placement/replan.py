"""From a present placement: few moves, best first, each of which helps by itself."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, Placement
from placement.cover import MOST_UNITS
from placement.dispatch import choose_ranks
from placement.effort import size_factor
from placement.errors import ConfigError, PlacementError
from placement.evaluate import check_fit
from placement.refine import Costs, Sample, Stage, refine_logged
from placement.topology import Topology
from placement.trace import RoutingTrace

REPLAN_COSTS = Costs(visit=1.0, unit_visit=0.02, balance=4.0)
PASSES = (0.02, 0.008, 0.003, 0.001)
SAMPLED_TOKENS, LEAST_SAMPLED = 8_000, 2_000
PROPOSALS_PER_SLOT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of a re-plan in one layer: slots (physical ids) and the experts that lie in them afterwards.

    A replacement fills one slot, a swap two; each slot filled is one expert copied.
    """

    layer: int
    slots: tuple[int, ...]
    experts: tuple[int, ...]

    @property
    def num_copies(self) -> int:
        return sum(expert != EMPTY for expert in self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """placement: the result, epoch one on. changes: the steps that lead there, best first.

    After any number of them the placement is valid and, on the traffic it was fitted on, no worse than before.
    """

    placement: Placement
    changes: tuple[Change, ...]

    @property
    def num_copies(self) -> int:
        return sum(change.num_copies for change in self.changes)


def apply_changes(current: Placement, changes: tuple[Change, ...]) -> Placement:
    """The placement after some changes, in order; its epoch is the current one's plus 1."""
    table = current.physical_to_logical.copy()
    for change in changes:
        table[change.layer, list(change.slots)] = change.experts
    return replace(current, epoch=current.epoch + 1, physical_to_logical=table)


def replan_within(
    current: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    *,
    most_copies: int,
    rows_of_rank: NDArray[np.int64] | None = None,
    costs: Costs = REPLAN_COSTS,
    seed: int = 0,
) -> Replan:
    """Improve the current placement by at most most_copies expert copies, the most useful ones first.

    homes [T]; rows_of_rank [R], where ranks have fewer slots than the table has rows. A change is taken only if it
    lowers the objective by more than the pass's threshold; thresholds fall from pass to pass over all layers, so what
    gains most comes first. On more than 64 ranks experts change places inside blocks of whole nodes with at most 64,
    and what each block serves of an expert with copies in several is taken as given.
    Raises ConfigError for a negative budget, PlacementError for a placement that does not fit.
    """
    check_fit(current, topology, trace)
    if most_copies < 0:
        raise ConfigError(f"the budget must be 0 copies or more, got {most_copies}")
    rng = np.random.default_rng(seed)
    # Of a large model fewer tokens and fewer changes are tried in each of its many layers.
    small = size_factor(trace)
    pick = rng.permutation(trace.num_tokens)[: max(LEAST_SAMPLED, int(SAMPLED_TOKENS * small))]
    home = np.ascontiguousarray(homes[pick], np.int32)
    rows = current.physical_to_logical.reshape(current.num_layers, current.num_ranks, -1).copy()
    sizes = np.full(current.num_ranks, rows.shape[2], np.int64) if rows_of_rank is None else rows_of_rank
    blocks = rank_blocks(topology.node_of_rank())
    changes: list[Change] = []
    left = most_copies

    def improve(layer: int, threshold: float, seed: int) -> list[Change]:
        chosen = np.ascontiguousarray(trace.experts[pick, layer], np.int32)
        effort = PROPOSALS_PER_SLOT * small
        return _improve_layer(
            rows[layer], sizes, chosen, home, topology, blocks, layer, current, costs, threshold, effort, seed
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, threshold in enumerate(PASSES):
            if left < 1:
                break
            order = rng.permutation(current.num_layers).tolist()
            found = pool.map(improve, order, itertools.repeat(threshold), itertools.repeat(seed + number))
            for layer, wanted in zip(order, list(found), strict=True):
                taken = _within(wanted, left)
                for change in taken:
                    rows[layer].reshape(-1)[list(change.slots)] = change.experts
                changes += taken
                left -= sum(change.num_copies for change in taken)
    return Replan(placement=apply_changes(current, tuple(changes)), changes=tuple(changes))


def rank_blocks(node_of_rank: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """The ranks in blocks of at most 64: whole nodes together where they fit, a larger node cut by itself."""
    blocks: list[NDArray[np.int64]] = []
    for node in range(int(node_of_rank[-1]) + 1):
        ranks = np.flatnonzero(node_of_rank == node)
        if blocks and len(blocks[-1]) + len(ranks) <= MOST_UNITS:
            blocks[-1] = np.concatenate([blocks[-1], ranks])
        else:
            blocks += [ranks[first : first + MOST_UNITS] for first in range(0, len(ranks), MOST_UNITS)]
    return blocks


def _improve_layer(
    rows: NDArray[np.int32],
    sizes: NDArray[np.int64],
    chosen: NDArray[np.int32],
    home: NDArray[np.int32],
    topology: Topology,
    blocks: list[NDArray[np.int64]],
    layer: int,
    current: Placement,
    costs: Costs,
    threshold: float,
    effort: float,
    seed: int,
) -> list[Change]:
    """Changes of one layer that each gain more than threshold, in order, block after block.

    effort: changes tried for each slot.
    """
    node_of_rank = topology.node_of_rank()
    width, num_experts = rows.shape[1], current.num_experts
    served = np.zeros_like(chosen)
    if len(blocks) > 1:
        held = np.zeros((len(rows), num_experts), np.uint16)
        rank, row = np.nonzero(rows != EMPTY)
        held[rank, rows[rank, row]] = current.rank_weights[layer, rank]
        served = choose_ranks(chosen, home, held, node_of_rank)
    found: list[Change] = []
    for ranks in blocks:
        here = np.isin(served, ranks) if len(blocks) > 1 else np.ones(chosen.shape, bool)
        tokens = np.flatnonzero(here.any(axis=1))
        local = np.full(len(rows), -1, np.int16)
        local[ranks] = np.arange(len(ranks))
        sample = Sample(
            chosen=np.where(here[tokens], chosen[tokens], -1).astype(np.int16),
            home=local[home[tokens]],
            group=np.zeros(len(tokens), np.uint8),
        )
        proposals = int(effort * len(ranks) * width)
        stage = Stage(tokens=SAMPLED_TOKENS, proposals=proposals, hot=-threshold, cold=-threshold, steady=True)
        share = np.full(len(ranks), 1 / len(ranks))
        nodes = np.unique(node_of_rank[ranks], return_inverse=True)[1].astype(np.int32)
        mine = rows[ranks]
        _, log = refine_logged(mine, sizes[ranks], share, sample, num_experts, costs, stage, seed, nodes)
        found += _changes_of(log, layer, mine, ranks)
    return found


def _changes_of(log: NDArray[np.int64], layer: int, rows: NDArray[np.int32], ranks: NDArray[np.int64]) -> list[Change]:
    """The log of a search over a block's rows [r, C] as changes of physical slots."""
    now, width, changes = rows.copy(), rows.shape[1], []
    for one, row, two, other, swap in log.tolist():
        slots, experts = [int(ranks[one]) * width + row], [int(now[two, other])]
        before = int(now[one, row])
        now[one, row] = experts[0]
        if swap:
            slots.append(int(ranks[two]) * width + other)
            experts.append(before)
            now[two, other] = before
        changes.append(Change(layer=layer, slots=tuple(slots), experts=tuple(experts)))
    return changes


def _within(wanted: list[Change], left: int) -> list[Change]:
    """The first changes that fit into what is left of the budget."""
    taken = []
    for change in wanted:
        if change.num_copies > left:
            break
        taken.append(change)
        left -= change.num_copies
    return taken


def num_copies_between(current: Placement, target: Placement) -> int:
    """Experts that must be copied to a rank that does not have them. Raises PlacementError where shapes differ."""
    before, after = current.copies_per_rank(), target.copies_per_rank()
    if before.shape != after.shape:
        raise PlacementError(f"the placements are of shapes {before.shape} and {after.shape}; they must be of one")
    return int(((after > 0) & (before == 0)).sum())
