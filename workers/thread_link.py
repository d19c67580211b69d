"""A link in software: a thread for the copies, and a token bucket for their bandwidth. Races show on any machine.

It keeps the promises of a GPU's link and no others: a blob is in its slot only once its arrival was waited for, urgent
batches overtake between two chunks, and nothing is copied before its fence.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.links import CHUNK_BYTES, Fence, Pair, chunks_of


class TokenBucket:
    """At most bytes_per_s over time, and burst_bytes at once."""

    def __init__(self, *, bytes_per_s: float, burst_bytes: float) -> None:
        self._rate = bytes_per_s
        self._burst = burst_bytes
        self._tokens = burst_bytes
        self._filled = time.monotonic()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may pass. More than the burst may pass at once, and is owed."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        self._tokens -= num_bytes
        if self._tokens < 0:
            time.sleep(-self._tokens / self._rate)


@dataclass(slots=True)
class _Batch:
    pieces: deque[Pair]
    ready: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self.ready.wait()

    def done(self) -> bool:
        return self.ready.is_set()

    def finish(self) -> None:
        self.ready.wait()


@dataclass(frozen=True, slots=True)
class _Mark:
    number: int


class ThreadLink:
    """delay is called at every event (submission, chunk, arrival, fence); tests let it sleep at random. defers: let a
    cache do things in the order in which it does them on a GPU."""

    overlaps = True

    def __init__(
        self,
        *,
        bytes_per_s: float,
        chunk_bytes: int = CHUNK_BYTES,
        delay: Callable[[], None] = lambda: None,
        defers: bool = False,
    ) -> None:
        self.defers = defers
        self._bucket = TokenBucket(bytes_per_s=bytes_per_s, burst_bytes=chunk_bytes)
        self._chunk_bytes = chunk_bytes
        self._delay = delay
        self._urgent: deque[_Batch] = deque()
        self._patient: deque[_Batch] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._fences = 0
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> _Batch:
        # The computing on a CPU is done when it returns, so that every fence has passed.
        assert after is None or after.number <= self._fences
        self._delay()
        batch = _Batch(deque(chunks_of(pairs, self._chunk_bytes)))
        with self._changed:
            (self._urgent if urgent else self._patient).append(batch)
            self._changed.notify()
        return batch

    def fence(self) -> Fence:
        self._delay()
        self._fences += 1
        return _Mark(self._fences)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._patient or self._closed)
                queue = self._urgent or self._patient
                if not queue:
                    return
                batch = queue[0]
            if batch.pieces:
                target, source = batch.pieces.popleft()
                self._delay()
                self._bucket.take(target.numel())
                target.copy_(source)
            if not batch.pieces:
                self._delay()
                with self._changed:
                    queue.popleft()
                batch.ready.set()
