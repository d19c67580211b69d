"""What a placement makes of each step, counted once: the cost model prices it for any device and any links.

S steps, L layers, R ranks. A vector is one token's hidden state on its way to a group of ranks; a sum comes home.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, Placement, Tier
from placement.costs import count_step
from placement.dispatch import holders_of
from placement.errors import ConfigError
from placement.evaluate import check_fit, max_over_mean
from placement.topology import Topology
from placement.trace import RoutingTrace

ALL_RESIDENT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Which tokens make up each step: index [n] into a trace's tokens, step by step, and bounds [S + 1] into index."""

    index: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def num_steps(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """tokens [S]; pairs (token, expert), read (distinct experts) and missed (of those, not on the GPU) [S, L, R] int32;
    vectors: all that cross each level, and busiest: through its busiest group [S, L, levels] int64, one way."""

    tokens: NDArray[np.int64]
    pairs: NDArray[np.int32]
    read: NDArray[np.int32]
    missed: NDArray[np.int32]
    vectors: NDArray[np.int64]
    busiest: NDArray[np.int64]

    @property
    def hit_rate(self) -> float:
        """The share of expert reads that find the GPU."""
        read = int(self.read.sum())
        return 1 - int(self.missed.sum()) / read if read else 1.0

    def step_imbalance(self) -> NDArray[np.float64]:
        """[S]: load max/mean over ranks of each step, averaged over layers."""
        return np.array([max_over_mean(step) for step in self.pairs])

    def vectors_per_token(self) -> NDArray[np.float64]:
        """[levels]: vectors that cross a level per token, over all layers, one way."""
        per_token: NDArray[np.float64] = self.vectors.sum(axis=(0, 1)) / self.tokens.sum()
        return per_token


@nb.njit(cache=True, nogil=True)
def _touch(rank: Any, expert: Any, used: Any, room: Any, clock: Any) -> Any:
    """One expert through the least-recently-used slots of a rank: used [R, E] when, -1 absent. Whether it missed."""
    clock[0] += 1
    missed = used[rank, expert] < 0
    if missed:
        if room[rank] > 0:
            room[rank] -= 1
        else:
            victim = -1
            for other in range(used.shape[1]):
                if used[rank, other] >= 0 and (victim < 0 or used[rank, other] < used[rank, victim]):
                    victim = other
            used[rank, victim] = -1
    used[rank, expert] = clock[0]
    return missed


@nb.njit(cache=True, nogil=True)
def _count_misses(seen: Any, pinned: Any, used: Any, room: Any, clock: Any, missed: Any) -> None:
    """A step's reads through every rank's slots, what is there first, as `workers/slot_cache.py` takes them."""
    for rank in range(seen.shape[0]):
        was_there = used[rank] >= 0
        for expert in range(seen.shape[1]):
            if seen[rank, expert] and not pinned[rank, expert] and was_there[expert]:
                _touch(rank, expert, used, room, clock)
        for expert in range(seen.shape[1]):
            if seen[rank, expert] and not pinned[rank, expert] and not was_there[expert]:
                missed[rank] += _touch(rank, expert, used, room, clock)


@nb.njit(cache=True, nogil=True)
def _count_layer(
    chosen: Any,
    home: Any,
    holds: Any,
    pinned: Any,
    room: Any,
    groups: Any,
    node_level: Any,
    bounds: Any,
    warm_up: Any,
    pairs: Any,
    read: Any,
    missed: Any,
    vectors: Any,
    busiest: Any,
) -> None:
    table, count = holders_of(holds)
    num_levels, num_ranks = groups.shape
    num_steps, top_k = len(bounds) - 1, chosen.shape[1]
    scratch = (
        np.full(2 * num_ranks, -1, np.int64),
        np.zeros(top_k, np.bool_),
        np.empty(top_k, np.int32),
        np.zeros(1, np.int64),
    )
    used, clock = np.full(holds.shape, -1, np.int64), np.zeros(1, np.int64)
    ignored = np.zeros(num_ranks, np.int32)
    for turn in range(-num_steps if warm_up else 0, num_steps):
        step = turn % num_steps
        sent, got = np.zeros((num_levels, num_ranks), np.int64), np.zeros((num_levels, num_ranks), np.int64)
        seen = np.zeros(holds.shape, np.bool_)
        own = slice(bounds[step], bounds[step + 1])
        pairs[step], read[step] = count_step(
            chosen[own], home[own], holds, table, count, groups, node_level, scratch, sent, got, seen
        )
        if len(room):
            _count_misses(seen, pinned, used, room, clock, ignored if turn < 0 else missed[step])
        for level in range(num_levels):
            vectors[step, level] = sent[level].sum()
            busiest[step, level] = max(sent[level].max(), got[level].max())


def count_steps(
    placement: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    steps: Steps,
    *,
    gpu_slots: int = ALL_RESIDENT,
    warm_up: bool = True,
) -> StepCounts:
    """Serve the steps of a trace. homes [T].

    gpu_slots: slots of each layer on each rank's GPU; 0: all experts are resident. Slots of tier hot are never evicted,
    the others are least-recently-used. warm_up: run the steps once through the slots before anything is counted.
    Raises as `check_fit`, and ConfigError where a rank has more hot experts than slots.
    """
    check_fit(placement, topology, trace)
    num_layers, num_ranks = placement.num_layers, topology.num_ranks
    shape = (num_layers, steps.num_steps, num_ranks)
    pairs, read, missed = (np.zeros(shape, np.int32) for _ in range(3))
    vectors, busiest = (np.zeros((num_layers, steps.num_steps, len(topology.levels)), np.int64) for _ in range(2))
    holds, pinned = placement.weights_per_rank(), _pinned(placement)
    room = _room(pinned, gpu_slots)
    home = np.ascontiguousarray(homes[steps.index], np.int32)
    warm_up = warm_up and gpu_slots != ALL_RESIDENT

    def count(layer: int) -> None:
        chosen = np.ascontiguousarray(trace.experts[steps.index, layer], np.int32)
        _count_layer(
            chosen,
            home,
            holds[layer],
            pinned[layer],
            room[layer].copy(),
            topology.groups,
            topology.node_level,
            steps.bounds,
            warm_up,
            pairs[layer],
            read[layer],
            missed[layer],
            vectors[layer],
            busiest[layer],
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(count, range(num_layers)))
    return StepCounts(
        tokens=np.diff(steps.bounds),
        pairs=pairs.transpose(1, 0, 2),
        read=read.transpose(1, 0, 2),
        missed=missed.transpose(1, 0, 2),
        vectors=vectors.transpose(1, 0, 2),
        busiest=busiest.transpose(1, 0, 2),
    )


def _pinned(placement: Placement) -> NDArray[np.bool_]:
    """[L, R, E]: experts that never leave the GPU of a rank."""
    pinned = np.zeros((placement.num_layers, placement.num_ranks, placement.num_experts), bool)
    table = placement.physical_to_logical
    layer, slot = np.nonzero((placement.tiers == Tier.HOT) & (table != EMPTY))
    pinned[layer, slot // placement.rows_per_rank, table[layer, slot]] = True
    return pinned


def _room(pinned: NDArray[np.bool_], gpu_slots: int) -> NDArray[np.int64]:
    """[L, R]: slots beside the pinned ones; [L, 0] where all experts are resident."""
    if gpu_slots == ALL_RESIDENT:
        return np.zeros((len(pinned), 0), np.int64)
    room: NDArray[np.int64] = gpu_slots - pinned.sum(axis=2, dtype=np.int64)
    if room.min() < 1:
        layer, rank = np.argwhere(room < 1)[0]
        raise ConfigError(
            f"{gpu_slots} GPU slots a layer leave no slot to cache in on rank {rank}, layer {layer}, which has "
            f"{gpu_slots - room[layer, rank]} hot experts; give more slots"
        )
    return room
