"""Whether prefetching pays, and how much of it there may be.

Three limits, each by itself: `PrefetchJudge` stops it where what it fetches is hardly ever used, `LinkRoom` keeps it to
the time in which the link idles, and `PrefetchTrial` steps with and without it now and then, and goes on with what was
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
INTERVAL_WEIGHT = 0.1
# On an H200 prefetches won where the link was busy for 0.45 of the time, and lost a fifth at 0.65.
BUSY = 0.5


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
    """The time in which a link idles, in bytes. clock: seconds.

    Where layers wait for the link a prefetch can only lose: by what it fetches in vain, and since urgent copies share
    the link with it. It gains where the link has nothing else to do. So all copies count as busy, urgent or not: a
    prefetch that made layers wait longer must not look like room for more. A link that was busy for most of the time
    between layers has no room at all.

    bytes_per_s: None until it is measured: no room. inf: no limit.
    """

    def __init__(self, clock: Callable[[], float], bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._layer, self._begun, self._copied = -1, 0.0, 0
        self._seconds, self._bytes, self._weight = 0.0, 0.0, 0.0

    def begin_layer(self, layer: int, copied: int) -> None:
        """A layer begins. copied: the bytes of all copies so far, urgent or not. What lies between the last layer of a
        step and the first of another says nothing: nobody may have asked for anything."""
        now = self._clock()
        if 0 < layer == self._layer + 1:
            self._weight += INTERVAL_WEIGHT * (1 - self._weight)
            self._seconds += INTERVAL_WEIGHT * (now - self._begun - self._seconds)
            self._bytes += INTERVAL_WEIGHT * (copied - self._copied - self._bytes)
        self._layer, self._begun, self._copied = layer, now, copied

    def left(self) -> float:
        """Bytes that may be fetched ahead in one layer."""
        if self.bytes_per_s is None or math.isinf(self.bytes_per_s):
            return 0.0 if self.bytes_per_s is None else math.inf
        if not self._weight:
            return 0.0
        could, did = self.bytes_per_s * self._seconds / self._weight, self._bytes / self._weight
        return 0.0 if did > BUSY * could else could - did


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
