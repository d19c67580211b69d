"""EvictionPolicy: what one cache remembers of its lookups, and what each expert in it is worth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.cache.beside import HEADER, serve
from placement.cache.finding import by_count, find
from placement.cache.memory import CLOCK, PolicyMemory, new_memory
from placement.cache.ranking import chances_of, learn_and_rank, observe, rank_slots, values_of
from placement.cache.reuse import discount_for
from placement.cache.values import LFU, LRFU, LRU, NEXT_USE, REUSE


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


# A layer that ran, and the distinct experts [n] that it needed, in ascending order.
Run = tuple[int, NDArray[np.int64]]


class Candidates(NamedTuple):
    """Who may make room for so many: see `rank_slots`."""

    layer_in: NDArray[np.int64]
    expert_in: NDArray[np.int64]
    free: NDArray[np.bool_]
    room: int


class EvictionPolicy:
    """Told of every layer's experts, it values any expert at any time. Not for several threads at once.

    share: the slots as a share of all experts that may come (0 to 1); top_k: how many a token uses.
    """

    def __init__(self, name: PolicyName, *, num_layers: int, num_experts: int, top_k: int, share: float) -> None:
        self.kind = _KINDS[name]
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.memory: PolicyMemory = new_memory(
            self.kind, num_layers, num_experts, top_k=top_k, discount=discount_for(share)
        )

    @property
    def clock(self) -> int:
        """How many layers it was told of."""
        return int(self.memory.whole[CLOCK])

    def resize(self, share: float) -> None:
        """The cache holds another share of the experts from now on."""
        self.memory.doubles[0] = discount_for(share)

    def observe(self, layer: int, experts: NDArray[np.int64]) -> None:
        """Layer `layer` needs these distinct experts now, in ascending order."""
        observe(self.memory, layer, experts)

    def learn(self, runs: Sequence[Run], then: Candidates | None = None) -> list[int]:
        """Observe runs, one after the other, and rank candidates after them: one compiled call, in which other threads
        go on."""
        layers = np.array([layer for layer, _ in runs], np.int64)
        ends = np.cumsum([len(experts) for _, experts in runs], dtype=np.int64)
        experts = np.concatenate([experts for _, experts in runs])
        found = NOBODY if then is None else then
        ranked = np.empty(len(found.free), np.int64)
        num = learn_and_rank(self.memory, layers, ends, experts, *found, ranked)
        slots: list[int] = ranked[:num].tolist()
        return slots

    def values(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.float64]:
        """What each (layer, expert) [n] is worth since the last observation; the least is the first to go."""
        values = np.empty(len(layers), np.float64)
        values_of(self.memory, layers, experts, values)
        return values

    def rank(
        self, layer_in: NDArray[np.int64], expert_in: NDArray[np.int64], free: NDArray[np.bool_], count: int
    ) -> list[int]:
        """Up to count of the free slots [S], those to be overwritten first at the front; see `rank_slots`."""
        ranked = np.empty(len(free), np.int64)
        num = rank_slots(self.memory, layer_in, expert_in, free, count, ranked)
        slots: list[int] = ranked[:num].tolist()
        return slots

    def chances(self, layer: int) -> NDArray[np.float64]:
        """The chance [E] of each expert of a layer to be used when it runs next. Needs PolicyName.REUSE."""
        assert self.kind == REUSE
        chances: NDArray[np.float64] = chances_of(self.memory, layer)
        return chances


NOBODY = Candidates(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), 0)


def compile_policies() -> None:
    """Have everything compiled that a cache runs, so that no step waits for the compiler."""
    policy = EvictionPolicy(PolicyName.REUSE, num_layers=1, num_experts=1, top_k=1, share=0.5)
    one = np.zeros(1, np.int64)
    policy.observe(0, one)
    policy.learn([(0, one)])
    asked, ask = os.pipe()
    os.close(ask)
    serve(policy.memory, np.zeros(HEADER, np.int64), one, one, one, one, one, np.ones(1, bool), one, asked, asked)
    os.close(asked)
    policy.values(one, one)
    policy.rank(one, one, np.ones(1, bool), 1)
    policy.chances(0)
    find(np.zeros((1, 2), np.int64), np.zeros(1, bool), np.zeros(1, bool), 0, one, np.zeros((3, 2), np.int64))
    by_count(one, 1)
