"""PolicyMemory: all that an eviction policy remembers, in three flat arrays.

Compiled code is called for every layer of every step, and a call's price is its arguments: numba looks at each array
anew. So there are three instead of twenty, and the compiled side cuts them into what they are made of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.matching import HISTORY_STEPS, NUM_LENGTHS, Matching, words_of
from placement.cache.reuse import DECAYS, LATER_STEPS, ReuseState, fill_new, reach_of, rows_of
from placement.cache.values import REUSE, UseHistory

CLOCK, NOW, KIND, LAYERS, EXPERTS, REUSE_LAYERS, REUSE_EXPERTS, REACH, CROWD, HEADER = range(10)


class PolicyMemory(NamedTuple):
    """singles float32: the model of reuse. doubles float64: the discount, then the history. whole int64: a header
    (clock of the next layer, layer that ran last, kind of policy, sizes), then what both count.
    """

    singles: NDArray[Any]
    doubles: NDArray[Any]
    whole: NDArray[Any]


def new_memory(kind: int, num_layers: int, num_experts: int, *, top_k: int, discount: float) -> PolicyMemory:
    """Nothing seen yet. Only PolicyName.REUSE has a model of reuse of its size."""
    layers, experts = (num_layers, num_experts) if kind == REUSE else (1, 1)
    reach, kinds, rows = reach_of(layers, experts), len(DECAYS), rows_of(layers)
    pairs, contexts = layers * experts, reach + min(reach, layers)
    memory = PolicyMemory(
        singles=np.zeros(
            (3 * kinds + 5 + (LATER_STEPS + 1) * kinds) * pairs
            + 2 * (layers + 2) * kinds
            + 2 * pairs * contexts * experts
            + 4 * (layers + 1) * NUM_LENGTHS,
            np.float32,
        ),
        doubles=np.zeros(1 + 4 * num_layers * num_experts + pairs, np.float64),
        whole=np.zeros(
            HEADER
            + num_layers * num_experts
            + num_layers
            + rows * (experts + 1)
            + HISTORY_STEPS * (layers * words_of(experts) + 3),
            np.int64,
        ),
    )
    memory.doubles[0] = discount
    memory.whole[:HEADER] = (0, 0, kind, num_layers, num_experts, layers, experts, reach, 0)
    history_views(memory).last[:] = -1
    fill_new(reuse_views(memory), top_k=min(top_k, experts))
    return memory


def history_views(memory: PolicyMemory) -> UseHistory:
    """The history, as it lies in the memory."""
    layers, experts = memory.whole[LAYERS], memory.whole[EXPERTS]
    pairs, shape = layers * experts, (layers, experts)
    weighted = memory.doubles[1:]
    counts = memory.whole[HEADER:]
    return UseHistory(
        counts[:pairs].reshape(shape),
        weighted[:pairs].reshape(shape),
        weighted[pairs : 2 * pairs].reshape(shape),
        weighted[2 * pairs : 3 * pairs].reshape(shape),
        weighted[3 * pairs : 4 * pairs].reshape(shape),
        counts[pairs : pairs + layers],
    )


def reuse_views(memory: PolicyMemory) -> ReuseState:
    """The model of reuse, as it lies in the memory."""
    layers, experts, reach = memory.whole[REUSE_LAYERS], memory.whole[REUSE_EXPERTS], memory.whole[REACH]
    kinds, rows = len(DECAYS), rows_of(layers)
    pairs, by_layer, by_kind = layers * experts, (layers, experts), (layers, kinds)
    wide, deep = (layers, kinds, experts), (layers, reach, experts, experts)
    context, depth = pairs * reach * experts, min(reach, layers)
    later_context = pairs * depth * experts
    first = memory.singles
    second = first[3 * kinds * pairs :]
    third = second[2 * layers * kinds :]
    fourth = third[2 * pairs :]
    fifth = fourth[2 * context :]
    sixth = fifth[2 * kinds + pairs :]
    seventh = sixth[2 * later_context :]
    eighth = seventh[2 * pairs + 2 * kinds :]
    ninth = eighth[(LATER_STEPS + 1) * kinds * pairs :]
    guesses, by_length = 2 * (layers + 1) * NUM_LENGTHS, (layers + 1, NUM_LENGTHS, 2)
    ring = memory.whole[HEADER + memory.whole[LAYERS] * (memory.whole[EXPERTS] + 1) :]
    history = ring[rows * (experts + 1) :]
    words = words_of(experts)
    past, steps = HISTORY_STEPS * layers * words, HISTORY_STEPS
    return ReuseState(
        first[: kinds * pairs].reshape(wide),
        first[kinds * pairs : 2 * kinds * pairs].reshape(wide),
        first[2 * kinds * pairs : 3 * kinds * pairs].reshape(wide),
        second[: layers * kinds].reshape(by_kind),
        second[layers * kinds : 2 * layers * kinds].reshape(by_kind),
        third[:pairs].reshape(by_layer),
        third[pairs : 2 * pairs].reshape(by_layer),
        fourth[:context].reshape(deep),
        fourth[context : 2 * context].reshape(deep),
        fifth[:kinds],
        fifth[kinds : 2 * kinds],
        fifth[2 * kinds : 2 * kinds + pairs].reshape(by_layer),
        ring[: rows * experts].reshape((rows, experts)),
        ring[rows * experts : rows * (experts + 1)],
        sixth[:later_context].reshape((layers, depth, experts, experts)),
        sixth[later_context : 2 * later_context].reshape((layers, depth, experts, experts)),
        seventh[:pairs].reshape(by_layer),
        seventh[pairs : 2 * pairs].reshape(by_layer),
        seventh[2 * pairs : 2 * pairs + kinds],
        seventh[2 * pairs + kinds : 2 * pairs + 2 * kinds],
        eighth[: (LATER_STEPS + 1) * kinds * pairs].reshape((layers, LATER_STEPS + 1, kinds, experts)),
        memory.whole[CROWD : CROWD + 1],
        memory.doubles[1 + 4 * memory.whole[LAYERS] * memory.whole[EXPERTS] :].reshape(by_layer),
        Matching(
            history[:past].reshape((steps * layers, words)),
            history[past : past + steps],
            history[past + steps : past + 2 * steps],
            history[past + 2 * steps : past + 3 * steps],
            ninth[:guesses].reshape(by_length),
            ninth[guesses:].reshape(by_length),
        ),
    )


open_history = njit(cache=True)(history_views)
open_reuse = njit(cache=True)(reuse_views)
