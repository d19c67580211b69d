"""Who makes room: what the experts in slots are worth now, and which of them are worth the least."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.later import discount_now
from placement.cache.learning import learn_uses
from placement.cache.memory import CLOCK, KIND, NOW, PolicyMemory, open_history, open_reuse
from placement.cache.reuse import near_logits, value_of
from placement.cache.values import REUSE, classic_value, layers_until, note_uses
from placement.cache.vectors import to_chances


@njit(cache=True)
def observe(memory: PolicyMemory, layer: int, experts: NDArray[Any]) -> None:
    """Layer `layer` needs these distinct experts now, in ascending order."""
    clock = memory.whole[CLOCK]
    if memory.whole[KIND] == REUSE:
        learn_uses(open_reuse(memory), clock, layer, experts)
    else:
        note_uses(open_history(memory), clock, layer, experts)
    memory.whole[NOW] = layer
    memory.whole[CLOCK] = clock + 1


@njit(cache=True)
def values_of(memory: PolicyMemory, layers: NDArray[Any], experts: NDArray[Any], values: NDArray[Any]) -> None:
    """What each (layer, expert) [n] is worth since the last observation, written to values; a layer below 0: 0."""
    now, kind = memory.whole[NOW], memory.whole[KIND]
    if kind != REUSE:
        history = open_history(memory)
        for index in range(len(layers)):
            if layers[index] >= 0:
                values[index] = classic_value(kind, history, now, layers[index], experts[index])
        return
    state = open_reuse(memory)
    discount = discount_now(state, memory.whole[CLOCK] - 1, memory.doubles[0])
    num_layers, num_experts = state.near_bias.shape
    chances = np.empty((num_layers, num_experts), np.float32)
    for layer in range(num_layers):
        near_logits(state, memory.whole[CLOCK] - 1, now, layer, chances[layer])
    to_chances(chances.reshape(-1))
    # A power takes as long as all else that a slot's value takes.
    until = np.empty(num_layers, np.float64)
    for layer in range(num_layers):
        until[layer] = discount ** (layers_until(num_layers, now, layer) / num_layers)
    for index in range(len(layers)):
        layer, expert = layers[index], experts[index]
        if layer >= 0:
            near, later = np.float64(chances[layer, expert]), state.later[layer, expert]
            values[index] = value_of(near, later, discount, until[layer])


@njit(cache=True)
def chances_of(memory: PolicyMemory, layer: int) -> NDArray[Any]:
    """The chance [E] of each expert of a layer to be used when it runs next."""
    state = open_reuse(memory)
    chances = np.empty(state.near_bias.shape[1], np.float32)
    near_logits(state, memory.whole[CLOCK] - 1, memory.whole[NOW], layer, chances)
    to_chances(chances)
    return chances


class Lesson(NamedTuple):
    """Room for runs to be learned, layers [R] and their experts [N], those of each up to its end [R]; and for slots to
    be ranked after them, layer_in, expert_in, free [S], and who was: ranked [S]."""

    layers: NDArray[Any]
    ends: NDArray[Any]
    experts: NDArray[Any]
    layer_in: NDArray[Any]
    expert_in: NDArray[Any]
    free: NDArray[Any]
    ranked: NDArray[Any]


@njit(cache=True, nogil=True)
def learn_and_rank(memory: PolicyMemory, lesson: Lesson, runs: int, slots: int, count: int) -> int:
    """Learn the first runs, then rank the first slots as `rank_slots` does. Returns how many were ranked."""
    begin = 0
    for run in range(runs):
        end = lesson.ends[run]
        observe(memory, lesson.layers[run], lesson.experts[begin:end])
        begin = end
    free = lesson.free[:slots]
    return int(rank_slots(memory, lesson.layer_in[:slots], lesson.expert_in[:slots], free, count, lesson.ranked))


@njit(cache=True)
def rank_slots(
    memory: PolicyMemory,
    layer_in: NDArray[Any],
    expert_in: NDArray[Any],
    free: NDArray[Any],
    count: int,
    ranked: NDArray[Any],
) -> int:
    """Up to count of the free slots [S], those to be overwritten first at the front: written to ranked [S].

    Empty ones (layer_in below 0) in ascending order, then those of least value; of equal ones the first. Returns how
    many.
    """
    found = 0
    for slot in range(len(free)):
        if found < count and free[slot] and layer_in[slot] < 0:
            ranked[found] = slot
            found += 1
    if found == count:
        return found
    values = np.empty(len(free), np.float64)
    values_of(memory, layer_in, expert_in, values)
    empty, least = found, ranked[found:]
    for slot in range(len(free)):
        if not free[slot] or layer_in[slot] < 0:
            continue
        place = found - empty
        if found < count:
            found += 1
        elif values[least[place - 1]] > values[slot]:
            place -= 1
        else:
            continue
        while place > 0 and values[least[place - 1]] > values[slot]:
            least[place] = least[place - 1]
            place -= 1
        least[place] = slot
    return found
