"""What a lookup leaves to be done, and no kernel waits for: the policy learns, what is foreseen is sent for, and who
makes room next is found out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from placement.cache.finding import by_count
from placement.cache.policy import EvictionPolicy
from workers.ahead import Ahead
from workers.slot_table import Found
from workers.slots import Slots


class Afterwards:
    """guesses: fetch ahead by the policy's model of reuse, since there is no router to ask."""

    def __init__(self, slots: Slots, policy: EvictionPolicy, ahead: Ahead, *, guesses: bool) -> None:
        self._slots = slots
        self._policy = policy
        self._ahead = ahead
        self._guesses = guesses
        self._put_off: Callable[[], None] | None = None

    def learn(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> None:
        """foreseen [m]: ids that a router asked ahead gave for the next layer."""
        self._policy.observe(layer, found.needed)
        if len(foreseen):
            self._ahead.prefetch(layer + 1, by_count(foreseen, self._policy.num_experts).tolist())
        elif self._guesses and self._ahead.looks_ahead():
            self._ahead.guess(layer + 1, len(found.needed))

    def end(self, layer: int, found: Found) -> None:
        """Who makes room for what the next layer will miss?"""
        if found.missing:
            self._slots.table.rank_ahead(len(found.needed))
        self._ahead.end_layer(layer)

    def put_off(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> None:
        """All of it is done when this one is told to catch up, before the next lookup at the latest."""
        foreseen = foreseen.copy()

        def work() -> None:
            self.learn(layer, found, foreseen)
            self.end(layer, found)

        self._put_off = work

    def catch_up(self) -> None:
        work, self._put_off = self._put_off, None
        if work is not None:
            work()
