"""EvictionPolicy: what one cache remembers of its lookups, and what each expert in it is worth."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.reuse import ReuseState, discount_for, learn_uses, near_chance, new_reuse, reuse_value
from placement.cache.values import LFU, LRFU, LRU, NEXT_USE, REUSE, UseHistory, classic_value, new_history, note_uses


class PolicyName(StrEnum):
    """See placement.cache.values for the first four, placement.cache.reuse for the last."""

    LRU = "lru"
    LFU = "lfu"
    LRFU = "lrfu"
    NEXT_USE = "next-use"
    REUSE = "reuse"


_KINDS = {
    PolicyName.LRU: LRU,
    PolicyName.LFU: LFU,
    PolicyName.LRFU: LRFU,
    PolicyName.NEXT_USE: NEXT_USE,
    PolicyName.REUSE: REUSE,
}


class EvictionPolicy:
    """Told of every layer's experts, it values any expert at any time. Not for several threads at once.

    share: the slots as a share of all experts that may come (0 to 1); top_k: how many a token uses.
    """

    def __init__(self, name: PolicyName, *, num_layers: int, num_experts: int, top_k: int, share: float) -> None:
        self.kind = _KINDS[name]
        self.discount = discount_for(share)
        self.history: UseHistory = new_history(num_layers, num_experts)
        small = (1, 1) if name != PolicyName.REUSE else (num_layers, num_experts)
        self.reuse: ReuseState = new_reuse(*small, top_k=min(top_k, small[1]))
        self.clock = 0
        self._layer = 0

    def resize(self, share: float) -> None:
        """The cache holds another share of the experts from now on."""
        self.discount = discount_for(share)

    def observe(self, layer: int, experts: NDArray[np.int64]) -> None:
        """Layer `layer` needs these distinct experts now."""
        chosen = experts.astype(np.int32)
        note_uses(self.history, self.clock, layer, chosen)
        if self.kind == REUSE:
            learn_uses(self.reuse, self.clock, layer, chosen)
        self._layer = layer
        self.clock += 1

    def values(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.float64]:
        """What each (layer, expert) [n] is worth since the last observation; the least is the first to go."""
        result: NDArray[np.float64] = _values(
            self.kind, self.history, self.reuse, self.discount, self.clock - 1, self._layer, layers, experts
        )
        return result

    def chances(self, layer: int) -> NDArray[np.float64]:
        """The chance [E] of each expert of a layer to be used when it runs next. Needs PolicyName.REUSE."""
        assert self.kind == REUSE
        result: NDArray[np.float64] = _chances(self.reuse, self.clock - 1, self._layer, layer)
        return result


def compile_policies() -> None:
    """Have everything compiled that a policy runs, so that no step waits for the compiler."""
    policy = EvictionPolicy(PolicyName.REUSE, num_layers=1, num_experts=1, top_k=1, share=0.5)
    policy.observe(0, np.zeros(1, np.int64))
    policy.values(np.zeros(1, np.int64), np.zeros(1, np.int64))
    policy.chances(0)


@njit(cache=True)
def _values(
    kind: int,
    history: UseHistory,
    reuse: ReuseState,
    discount: float,
    clock: int,
    now: int,
    layers: NDArray[Any],
    experts: NDArray[Any],
) -> NDArray[Any]:
    values = np.empty(len(layers), np.float64)
    for index in range(len(layers)):
        if kind == REUSE:
            values[index] = reuse_value(reuse, discount, clock, now, layers[index], experts[index])
        else:
            values[index] = classic_value(kind, history, now, layers[index], experts[index])
    return values


@njit(cache=True)
def _chances(reuse: ReuseState, clock: int, now: int, layer: int) -> NDArray[Any]:
    chances = np.empty(reuse.near_bias.shape[1], np.float64)
    for expert in range(len(chances)):
        chances[expert] = near_chance(reuse, clock, now, layer, expert)
    return chances
