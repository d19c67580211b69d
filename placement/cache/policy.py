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
from placement.cache.ranking import Lesson, chances_of, learn_and_rank, observe, rank_slots, values_of
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
        num_experts, num_slots = sum(len(experts) for _, experts in runs), 0 if then is None else len(then.free)
        lesson = new_lesson(len(runs), num_experts, num_slots)
        num = learn_and_rank(self.memory, lesson, *write_lesson(lesson, runs, then))
        slots: list[int] = lesson.ranked[:num].tolist()
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


def new_lesson(num_runs: int, num_experts: int, num_slots: int) -> Lesson:
    """An empty one. num_experts: of all runs together."""
    return Lesson(
        layers=np.zeros(num_runs, np.int64),
        ends=np.zeros(num_runs, np.int64),
        experts=np.zeros(num_experts, np.int64),
        layer_in=np.zeros(num_slots, np.int64),
        expert_in=np.zeros(num_slots, np.int64),
        free=np.zeros(num_slots, bool),
        ranked=np.zeros(num_slots, np.int64),
    )


def write_lesson(lesson: Lesson, runs: Sequence[Run], then: Candidates | None) -> tuple[int, int, int]:
    """Runs, and candidates to be ranked, into the beginning of a lesson. Returns how many runs and slots these are, and
    for how many to make room."""
    end = 0
    for number, (layer, experts) in enumerate(runs):
        begin, end = end, end + len(experts)
        lesson.experts[begin:end] = experts
        lesson.layers[number], lesson.ends[number] = layer, end
    if then is None:
        return len(runs), 0, 0
    num_slots = len(then.free)
    lesson.layer_in[:num_slots], lesson.expert_in[:num_slots] = then.layer_in, then.expert_in
    lesson.free[:num_slots] = then.free
    return len(runs), num_slots, then.room


def compile_policies() -> None:
    """Have everything compiled that a cache runs, so that no step waits for the compiler."""
    policy = EvictionPolicy(PolicyName.REUSE, num_layers=1, num_experts=1, top_k=1, share=0.5)
    one = np.zeros(1, np.int64)
    policy.observe(0, one)
    policy.learn([(0, one)])
    asked, ask = os.pipe()
    os.close(ask)
    serve(policy.memory, np.zeros(HEADER, np.int64), new_lesson(1, 1, 1), asked, asked)
    os.close(asked)
    policy.values(one, one)
    policy.rank(one, one, np.ones(1, bool), 1)
    policy.chances(0)
    find(np.zeros((1, 2), np.int64), np.zeros(1, bool), np.zeros(1, bool), 0, one, np.zeros((3, 2), np.int64))
    by_count(one, 1)
