"""What a slot cache counts, and the alarm when it hits too little for too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)
WINDOW_LOOKUPS = 20_000
ALARM_BELOW, DIAGNOSE_BELOW = 0.8, 0.5


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """How often an expert that a step needed was in a slot already, and what was copied, waited for and evicted.

    stall_s: what the computing thread waited for copies (on a GPU the stream waits, not the thread).
    window_*: lookups since the hit rate was last looked at.
    """

    lookups: int = 0
    hits: int = 0
    copies: int = 0
    copied_bytes: int = 0
    evictions: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    prefetch_wasted_bytes: int = 0
    streamed_layers: int = 0
    resizes: int = 0
    stall_s: float = 0.0
    window_lookups: int = 0
    window_hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else float("nan")

    def look_up(self, lookups: int, hits: int) -> None:
        self.lookups += lookups
        self.hits += hits
        self.window_lookups += lookups
        self.window_hits += hits
        if self.window_lookups >= WINDOW_LOOKUPS:
            self._judge_window()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.stall_s += time.perf_counter() - begun

    def _judge_window(self) -> None:
        rate = self.window_hits / self.window_lookups
        if rate < DIAGNOSE_BELOW:
            logger.warning(
                "expert cache: %.0f%% of lookups hit: the slots are fewer than a step's experts; raise cache_share, "
                "lower max_batch_tokens or keep experts in fewer bits",
                100 * rate,
            )
        elif rate < ALARM_BELOW:
            logger.warning("expert cache: %.0f%% of the last %d lookups hit", 100 * rate, self.window_lookups)
        self.window_lookups = self.window_hits = 0
