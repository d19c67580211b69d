"""What a lookup leaves to be done, and no kernel waits for: the policy learns, what is foreseen is sent for, and who
makes room next is found out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.cache.finding import by_count
from workers.ahead import Ahead
from workers.learner import Learner
from workers.slot_table import Found
from workers.slots import Slots

# To have the policy's thread begin takes the host as long as a launch.
AT_ONCE = 3


class _Left(NamedTuple):
    """What a layer's lookup left to be done. guesses: whether to fetch ahead, found out as the layer ran: who finds it
    out later may do so when the next layer was looked up, and send twice for what that one sends for."""

    layer: int
    found: Found
    foreseen: NDArray[np.int64]
    guesses: bool


class Afterwards:
    """guesses: fetch ahead by the policy's model of reuse, since there is no router to ask.

    What is put off is done in the order in which it came, and before anybody is ranked, so that it decides the same.
    """

    def __init__(self, slots: Slots, policy: Learner, ahead: Ahead, *, guesses: bool) -> None:
        self._slots = slots
        self._policy = policy
        self._ahead = ahead
        self._guesses = guesses
        self._put_off: deque[_Left] = deque()

    def learn(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> None:
        """foreseen [m]: ids that a router asked ahead gave for the next layer."""
        self.catch_up()
        self._learn(self._left(layer, found, foreseen))

    def _left(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> _Left:
        guesses = self._guesses and not len(foreseen) and self._ahead.looks_ahead()
        return _Left(layer, found, foreseen, guesses)

    def _learn(self, left: _Left) -> None:
        self._policy.observe(left.layer, left.found.needed)
        if len(left.foreseen):
            self._ahead.prefetch(left.layer + 1, by_count(left.foreseen, self._policy.num_experts).tolist())
        elif left.guesses:
            self._ahead.guess(left.layer + 1, len(left.found.needed))

    def end(self, layer: int, found: Found) -> None:
        """Who makes room for what the next layer will miss?"""
        if found.missing:
            self._slots.table.rank_ahead(len(found.needed))
        self._ahead.end_layer(layer)

    def put_off(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> None:
        """Do it later."""
        self._put_off.append(self._left(layer, found._replace(needed=found.needed.copy()), foreseen.copy()))

    def catch_up(self) -> None:
        """Do all that was put off, and return once it is done."""
        self._policy.wait()
        while self._put_off:
            left = self._put_off.popleft()
            self._learn(left)
            self.end(left.layer, left.found)

    def go_on(self, in_use: Sequence[int] = ()) -> None:
        """Copies have just been given, or kernels: what was put off is done beside them if the policy's thread idles.
        in_use: slots that the last layer still holds."""
        if self._policy.is_idle() and not self._is_for_the_caller():
            self._go_on(in_use)

    def use_the_time(self) -> None:
        """The host is about to wait for the device: what was put off of a layer that missed something is done now, or
        begun. What other layers leave to be learned comes a few at once."""
        if not self._put_off:
            return
        if self._is_for_the_caller():
            self.catch_up()
        elif self._put_off[-1].found.missing or len(self._put_off) >= self._policy.num_layers:
            self._go_on()
        elif len(self._put_off) >= AT_ONCE:
            self.go_on()

    def _is_for_the_caller(self) -> bool:
        """Whether something may have to be sent for, which the policy's thread can't do."""
        return self._slots.table.num_foreseen > 0 or any(len(left.foreseen) or left.guesses for left in self._put_off)

    def _go_on(self, in_use: Sequence[int] = ()) -> None:
        runs = [(left.layer, left.found.needed) for left in self._put_off]
        last = self._put_off[-1].found
        self._put_off.clear()
        self._slots.table.learn_beside(runs, len(last.needed) if last.missing else 0, in_use)
