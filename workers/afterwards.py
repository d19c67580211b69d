"""What a lookup leaves to be done, and no kernel waits for: the policy learns, what is foreseen is sent for, and who
makes room next is found out."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from placement.cache.finding import by_count
from workers.ahead import Ahead
from workers.learner import Learner
from workers.slot_table import Found
from workers.slots import Slots


class Afterwards:
    """guesses: fetch ahead by the policy's model of reuse, since there is no router to ask.

    What is put off is done in the order in which it came, and before anybody is ranked, so that it decides the same.
    """

    def __init__(self, slots: Slots, policy: Learner, ahead: Ahead, *, guesses: bool) -> None:
        self._slots = slots
        self._policy = policy
        self._ahead = ahead
        self._guesses = guesses
        self._put_off: deque[tuple[int, Found, NDArray[np.int64]]] = deque()

    def learn(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> None:
        """foreseen [m]: ids that a router asked ahead gave for the next layer."""
        self.catch_up()
        self._learn(layer, found, foreseen)

    def _learn(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> None:
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
        """Do it later."""
        self._put_off.append((layer, found._replace(needed=found.needed.copy()), foreseen.copy()))

    def catch_up(self) -> None:
        """Do all that was put off, and return once it is done."""
        self._policy.wait()
        while self._put_off:
            layer, found, foreseen = self._put_off.popleft()
            self._learn(layer, found, foreseen)
            self.end(layer, found)

    def use_the_time(self) -> None:
        """The host is about to wait for the device. Where the last layer missed something all is done, in the policy's
        thread if nothing is to be sent for; else only what can't wait: nothing, as a rule, for at most as many layers
        as there are."""
        if not self._put_off:
            return
        _, found, foreseen = self._put_off[-1]
        table = self._slots.table
        if len(foreseen) or table.num_foreseen or (self._guesses and self._ahead.looks_ahead()):
            self.catch_up()
        elif found.missing or len(self._put_off) >= self._policy.num_layers:
            runs = [(layer, found.needed) for layer, found, _ in self._put_off]
            self._put_off.clear()
            if found.missing:
                table.learn_and_rank_ahead(runs, len(found.needed))
            else:
                self._policy.begin(runs)
