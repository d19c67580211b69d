"""A policy that learns beside its caller.

What a lookup teaches takes as long as all else that the host does for a layer of one token, and nobody needs it before
somebody has to make room. So it is done by a thread that never holds Python's lock: one compiled loop
(`placement.cache.beside`) that waits at a pipe for what to learn, and says at another that it has. Whoever asks the
policy anything waits for it, so that it decides as it would without the thread.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cache.beside import END, GO_ON, HEADER, LEARNED, RANKED, serve
from placement.cache.policy import Candidates, EvictionPolicy, Run, new_lesson, write_lesson

Numbers = NDArray[np.int64]
INTERRUPTED_MS = 1000


class Learner:
    """See `EvictionPolicy` for what is not said here. One thread at a time may use it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.num_layers = policy.num_layers
        self.num_experts = policy.num_experts
        self._policy = policy
        self._beside: _Beside | None = None
        self._under_way = False

    def begin(self, runs: Sequence[Run], then: Candidates | None = None) -> None:
        """Begin to learn runs, one after the other, and then to rank candidates."""
        self.wait()
        num_slots = 0 if then is None else len(then.free)
        if self._beside is not None and self._beside.most_slots < num_slots:
            self.close()
        if self._beside is None:
            self._beside = _Beside(self._policy, num_slots)
        self._beside.give(runs, then)
        # Before it goes on: an interrupt may come right after.
        self._under_way = True
        self._beside.go_on()

    def is_idle(self) -> bool:
        """Whether `begin` would not wait."""
        return not self._under_way or (self._beside is not None and self._beside.has_learned())

    def wait(self) -> None:
        """Return once all that was begun is learned."""
        if self._under_way and self._beside is not None:
            self._beside.wait()
        self._under_way = False

    def ranked(self) -> list[int]:
        """Whom the last `begin` was to rank."""
        self.wait()
        return [] if self._beside is None else self._beside.ranked()

    def observe(self, layer: int, experts: Numbers) -> None:
        self.wait()
        self._policy.observe(layer, experts)

    def values(self, layers: Numbers, experts: Numbers) -> NDArray[np.float64]:
        self.wait()
        return self._policy.values(layers, experts)

    def rank(self, candidates: Candidates) -> list[int]:
        self.wait()
        return self._policy.rank(*candidates)

    def chances(self, layer: int) -> NDArray[np.float64]:
        self.wait()
        return self._policy.chances(layer)

    def close(self) -> None:
        """End the thread, if there is one."""
        self.wait()
        if self._beside is not None:
            self._beside.close()
            self._beside = None


class _Beside:
    """The thread, and what it is given: see `serve`."""

    def __init__(self, policy: EvictionPolicy, num_slots: int) -> None:
        num_items = policy.num_layers * policy.num_experts
        self.most_slots = most = max(num_items, num_slots)
        self._mail = np.zeros(HEADER, np.int64)
        self._lesson = new_lesson(policy.num_layers, num_items, most)
        asked, self._ask = os.pipe()
        self._told, tell = os.pipe()
        os.set_blocking(self._told, False)
        self._waiting = select.poll()
        self._waiting.register(self._told, select.POLLIN)
        self._thread = threading.Thread(
            target=serve, args=(policy.memory, self._mail, self._lesson, asked, tell), name="learner", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._ask, self._thread, (asked, tell, self._told))

    def give(self, runs: Sequence[Run], then: Candidates | None) -> None:
        self._mail[:] = (*write_lesson(self._lesson, runs, then), 0, 0)

    def go_on(self) -> None:
        os.write(self._ask, GO_ON)

    def has_learned(self) -> bool:
        return bool(self._mail[LEARNED])

    def wait(self) -> None:
        while True:
            try:
                os.read(self._told, 1)
                return
            except BlockingIOError:
                had_learned = self.has_learned()
                if self._waiting.poll(INTERRUPTED_MS):
                    continue
                if had_learned:
                    return  # An interrupt came right after somebody had read it.
                if not self._thread.is_alive():
                    raise RuntimeError("the thread in which the cache's policy learns has ended") from None

    def ranked(self) -> list[int]:
        slots: list[int] = self._lesson.ranked[: self._mail[RANKED]].tolist()
        return slots

    def close(self) -> None:
        self._end()


def _end(ask: int, thread: threading.Thread, others: Sequence[int]) -> None:
    if thread.is_alive():
        # To close it does not do where a forked process has it open too, and there the thread does not live.
        os.write(ask, END)
    os.close(ask)
    thread.join()
    for each in others:
        os.close(each)
