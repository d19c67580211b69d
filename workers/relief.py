"""Relief: when memory is short, prefetching stops, the expert cache shrinks, and what failed is tried again.

The cache grows back by itself, step by step, once there has been room for a while; after a setback it waits longer.
Everything here runs on the serving thread, at moments when no slot is held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from workers.memory import Memory
from workers.slot_cache import SlotCache

logger = logging.getLogger(__name__)
SHRINK, GROW = 0.75, 1.25
WAIT_STEPS, MOST_WAIT_STEPS = 256, 16384
SPARE_SHARE = 0.5

Result = TypeVar("Result")


class Relief:
    """Keeps a cache at num_slots, fewer while memory is short. least: slots that it never goes below."""

    def __init__(self, cache: SlotCache, memory: Memory, *, least: int, wait_steps: int = WAIT_STEPS) -> None:
        self._cache = cache
        self._memory = memory
        self._wanted = cache.num_slots
        self._wants_region = cache.ahead.region > 0
        self._least = min(least, cache.num_slots)
        self._first_wait = self._wait = wait_steps
        self._quiet_steps = 0

    def attempt(self, work: Callable[[], Result]) -> Result:
        """Do it; where memory is short make room and do it again, as long as there is room to be made. Raises
        torch.OutOfMemoryError where that does not suffice."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # Not in the handler: until it is left, the traceback keeps the failed attempt's tensors.
            if not self.make_room(reason):
                raise torch.OutOfMemoryError(reason)

    def make_room(self, reason: str) -> bool:
        """Drop the region of prefetches and a quarter of the slots; False where nothing is left to give."""
        cache = self._cache
        before = cache.num_slots
        after = max(self._least, int(before * SHRINK))
        if after == before and cache.ahead.region == 0:
            return False
        cache.let_go()
        if self._quiet_steps < self._wait and cache.counters.reliefs:
            self._wait = min(2 * self._wait, MOST_WAIT_STEPS)
        self._quiet_steps = 0
        cache.resize(after, prefetch=False)
        cache.counters.reliefs += 1
        logger.warning(
            "memory is short (%s): the expert cache goes from %d to %d slots, nothing is fetched ahead, and what "
            "failed is tried again; it grows back when there is room",
            reason.splitlines()[0][:200],
            before,
            after,
        )
        return True

    def reserve(self, what: str, num_bytes: int) -> None:
        """Make room for something that comes once, such as the KV cache. Raises torch.OutOfMemoryError."""
        while self._memory.free_bytes() < num_bytes and self.make_room(f"{what} needs {num_bytes} bytes"):
            continue
        self._memory.claim(what, num_bytes)

    def end_step(self) -> None:
        """A step is over: grow back by a part, if there was room for long enough."""
        cache = self._cache
        lacks_region = self._wants_region and cache.ahead.region == 0
        if cache.num_slots >= self._wanted and not lacks_region:
            return
        self._quiet_steps += 1
        if self._quiet_steps < self._wait:
            return
        self._quiet_steps = 0
        before = cache.num_slots
        after = min(self._wanted, int(before * GROW) + 1)
        more = (after - before) * cache.blob_bytes
        if self._memory.free_bytes() < more * (1 + SPARE_SHARE):
            return
        cache.resize(after, prefetch=after == self._wanted)
        logger.info("there is memory again: the expert cache goes from %d to %d slots", before, cache.num_slots)
        if cache.num_slots == self._wanted:
            self._wait = self._first_wait
