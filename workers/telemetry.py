"""What a slot cache counts, and the alarm when it hits too little for too long."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)
WINDOW_LOOKUPS = 20_000
SUSTAINED_WINDOWS = 3
ALARM_BELOW, DIAGNOSE_BELOW = 0.8, 0.5
FINE, LOW, VERY_LOW = 0, 1, 2


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """How often an expert that a step needed was in a slot already, and what was copied, waited for and evicted.

    stream_from: with so many missing, a layer streams. reliefs: times that room was made because memory was short.
    stall_s: what the computing thread waited for copies (on a GPU the stream waits, not the thread).
    window_*: lookups since the hit rate was last looked at. low_windows: so many in a row were below 80%.
    alarm: 0, 1 after three such windows in a row, 2 if the last was below 50%; each is logged once, until hits are
    enough again.
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
    reliefs: int = 0
    stream_from: int = 0
    resizes: int = 0
    stall_s: float = 0.0
    window_lookups: int = 0
    window_hits: int = 0
    low_windows: int = 0
    alarm: int = FINE

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

    def _judge_window(self) -> None:
        rate = self.window_hits / self.window_lookups
        self.window_lookups = self.window_hits = 0
        self.low_windows = self.low_windows + 1 if rate < ALARM_BELOW else 0
        level = FINE if self.low_windows == 0 else VERY_LOW if rate < DIAGNOSE_BELOW else LOW
        if level == FINE and self.alarm != FINE:
            logger.info("expert cache: %.0f%% of lookups hit again", 100 * rate)
        if level == FINE or (self.low_windows >= SUSTAINED_WINDOWS and level > self.alarm):
            self.alarm = level
            if level == VERY_LOW:
                logger.warning(
                    "expert cache: %.0f%% of lookups hit: the slots are fewer than a step's experts; raise "
                    "cache_share, lower max_batch_tokens or keep experts in fewer bits",
                    100 * rate,
                )
            elif level == LOW:
                logger.warning(
                    "expert cache: %.0f%% of lookups hit, and fewer than %.0f%% for %d lookups: raise cache_share",
                    100 * rate,
                    100 * ALARM_BELOW,
                    self.low_windows * WINDOW_LOOKUPS,
                )
