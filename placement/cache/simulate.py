"""Play a stream of lookups through slots: what a policy hits, and what Belady's optimum would have hit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.memory import PolicyMemory
from placement.cache.policy import EvictionPolicy
from placement.cache.ranking import observe, values_of
from placement.cache.stream import LookupStream

NEVER = 1 << 60


def simulate(
    stream: LookupStream, policy: EvictionPolicy, arena_of: NDArray[np.int64], sizes: NDArray[np.int64]
) -> int:
    """The hits of a policy. arena_of [L]: which arena a layer's experts lie in; sizes [A]: the slots of each arena.

    A layer's experts are held while it runs. Where they outnumber the arena's slots, what is left over is not kept.
    The policy goes on learning, as it would while serving.
    """
    return int(
        _simulate(stream.ids.astype(np.int64), stream.offsets, policy.memory, arena_of, sizes, policy.num_experts)
    )


def belady_hits(stream: LookupStream, num_slots: int) -> int:
    """The most hits that any choice of victims could reach in one arena: who is used furthest ahead makes room."""
    layer_of = np.repeat(np.arange(len(stream.offsets) - 1) % stream.num_layers, np.diff(stream.offsets))
    items = layer_of * stream.num_experts + stream.ids
    return int(_belady(items.astype(np.int64), stream.offsets, stream.num_layers * stream.num_experts, num_slots))


@njit(cache=True)
def _simulate(
    ids: NDArray[Any],
    offsets: NDArray[Any],
    memory: PolicyMemory,
    arena_of: NDArray[Any],
    sizes: NDArray[Any],
    num_experts: int,
) -> int:
    num_layers = len(arena_of)
    cached = np.zeros((num_layers, num_experts), np.bool_)
    layer_in = np.zeros((len(sizes), sizes.max()), np.int64)
    expert_in = np.zeros((len(sizes), sizes.max()), np.int64)
    filled = np.zeros(len(sizes), np.int64)
    values = np.zeros(sizes.max(), np.float64)
    used = np.zeros(num_experts, np.bool_)
    hits = 0
    for run in range(len(offsets) - 1):
        layer = run % num_layers
        needed = ids[offsets[run] : offsets[run + 1]]
        observe(memory, layer, needed)
        arena = arena_of[layer]
        layers, experts = layer_in[arena], expert_in[arena]
        missing = 0
        for expert in needed:
            missing += not cached[layer, expert]
        hits += len(needed) - missing
        if filled[arena] + missing > sizes[arena]:
            size = filled[arena]
            values_of(memory, layers[:size], experts[:size], values)
            used[:] = False
            used[needed] = True
            for index in range(size):
                if layers[index] == layer and used[experts[index]]:
                    values[index] = np.inf
        for expert in needed:
            if cached[layer, expert]:
                continue
            if filled[arena] < sizes[arena]:
                index = filled[arena]
                filled[arena] += 1
            else:
                index = int(np.argmin(values[: filled[arena]]))
                if values[index] == np.inf:
                    break
                cached[layers[index], experts[index]] = False
            layers[index], experts[index] = layer, expert
            cached[layer, expert] = True
            values[index] = np.inf
    return hits


@njit(cache=True)
def _belady(items: NDArray[Any], offsets: NDArray[Any], num_items: int, num_slots: int) -> int:
    next_use = np.empty(len(items), np.int64)
    soonest = np.full(num_items, NEVER, np.int64)
    for index in range(len(items) - 1, -1, -1):
        next_use[index] = soonest[items[index]]
        soonest[items[index]] = index
    slot_of = np.full(num_items, -1, np.int64)
    item_in = np.zeros(num_slots, np.int64)
    due = np.zeros(num_slots, np.int64)
    held = np.full(num_slots, -1, np.int64)
    filled = hits = 0
    for run in range(len(offsets) - 1):
        span = range(offsets[run], offsets[run + 1])
        for index in span:
            slot = slot_of[items[index]]
            if slot >= 0:
                hits += 1
                due[slot] = next_use[index]
                held[slot] = run
        for index in span:
            if slot_of[items[index]] >= 0:
                continue
            slot = filled
            if filled < num_slots:
                filled += 1
            else:
                slot = -1
                for other in range(num_slots):
                    if held[other] != run and (slot < 0 or due[other] > due[slot]):
                        slot = other
                if slot < 0:
                    break
                slot_of[item_in[slot]] = -1
            item_in[slot] = items[index]
            slot_of[items[index]] = slot
            due[slot] = next_use[index]
            held[slot] = run
    return hits
