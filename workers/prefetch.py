"""Whether prefetching pays: it switches itself off when what it fetches is hardly ever used, and tries again later."""

from __future__ import annotations

MEMORY = 256
ENOUGH = 64
LEAST_PRECISION = 0.4
PAUSE_CALLS = 2000


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
