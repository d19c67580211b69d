"""Whether prefetching pays, and how much of it there may be.

Three limits, each by itself: `PrefetchJudge` stops it where what it fetches is hardly ever used, `LinkRoom` keeps it to
what the layers leave of the link, and `PrefetchTrial` steps with and without it now and then, and goes on with what was
faster.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable

MEMORY = 256
ENOUGH = 64
LEAST_PRECISION = 0.4
PAUSE_CALLS = 2000

TRIAL_EVERY = 4096
TRIAL_FROM, TRIAL_BLOCKS, TRIAL_BLOCK = 16, 12, 8
TRIAL_LEAST = 8
INTERVAL_WEIGHT = 0.2


class PrefetchJudge:
    """Counts what became of prefetched experts, the last few hundred weighing most."""

    def __init__(self) -> None:
        self._hits = 0.0
        self._total = 0.0
        self._paused = 0

    @property
    def precision(self) -> float:
        return self._hits / self._total if self._total else 1.0

    def used(self) -> None:
        self._count(1.0)

    def wasted(self) -> None:
        self._count(0.0)

    def allows(self) -> bool:
        """Asked before each prefetch."""
        if self._paused:
            self._paused -= 1
            if not self._paused:
                self._hits = self._total = 0.0
            return False
        if self._total >= ENOUGH and self.precision < LEAST_PRECISION:
            self._paused = PAUSE_CALLS
            return False
        return True

    def _count(self, hit: float) -> None:
        if self._total >= MEMORY:
            self._hits *= 0.5
            self._total *= 0.5
        self._hits += hit
        self._total += 1


class LinkRoom:
    """What urgent copies leave of the link between two layers. clock: seconds.

    bytes_per_s is None until it was measured; there is no limit then.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.bytes_per_s: float | None = None
        self._clock = clock
        self._asked: float | None = None
        self._interval = 0.0
        self._demanded = 0

    def left(self, demanded: int) -> float:
        """Bytes that a layer ahead may fetch now. demanded: the urgent bytes of all layers so far."""
        now, urgent = self._clock(), demanded - self._demanded
        if self._asked is not None:
            elapsed = now - self._asked
            self._interval += (INTERVAL_WEIGHT if self._interval else 1.0) * (elapsed - self._interval)
        self._asked, self._demanded = now, demanded
        if self.bytes_per_s is None or not self._interval:
            return math.inf
        return max(0.0, self.bytes_per_s * self._interval - urgent)


class PrefetchTrial:
    """Steps by turns with and without prefetching, at times that all ranks have in common, then the faster way.

    Of 4,096 steps the first hundred or so are such a trial: eight with, eight without, and so on. Steps are compared
    with others of about as many tokens.
    """

    def __init__(self) -> None:
        self.pays = True
        self._seconds: dict[tuple[int, bool], list[float]] = defaultdict(list)

    def wants(self, step: int) -> bool:
        """Whether this step is to prefetch."""
        turn = self._turn(step)
        return self.pays if turn is None else turn

    def took(self, step: int, tokens: int, seconds: float) -> None:
        turn = self._turn(step)
        if turn is not None and tokens:
            self._seconds[tokens.bit_length(), turn].append(seconds)
        elif turn is None and self._seconds:
            self._decide()
            self._seconds.clear()

    @staticmethod
    def _turn(step: int) -> bool | None:
        block, _ = divmod(step % TRIAL_EVERY - TRIAL_FROM, TRIAL_BLOCK)
        return block % 2 == 0 if 0 <= block < TRIAL_BLOCKS else None

    def _decide(self) -> None:
        gain = weight = 0.0
        for size in {size for size, _ in self._seconds}:
            on, off = self._seconds[size, True], self._seconds[size, False]
            if min(len(on), len(off)) >= TRIAL_LEAST:
                gain += len(on) * math.log(statistics.median(off) / statistics.median(on))
                weight += len(on)
        if weight:
            self.pays = gain > 0
