"""A GPU's streams in software, for the bounce ring: each a thread that copies in order, later than it was told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from workers.bounce_link import BounceLink
from workers.bounce_ring import BounceRing
from workers.links import Arrival, Fence, Pair

# A fence that is never passed must not hang the tests.
PATIENCE_S = 20.0


class Gate:
    """A fence that is passed when a test says so."""

    number = 1

    def __init__(self) -> None:
        self.passed = threading.Event()

    def finish(self) -> None:
        assert self.passed.wait(PATIENCE_S)


@dataclass(frozen=True, slots=True)
class _Mark:
    number: int


class _Arrived(threading.Event):
    """What a stream has come to."""

    def finish(self) -> None:
        assert self.wait(PATIENCE_S)

    def done(self) -> bool:
        return self.is_set()


class SoftEdge:
    """delay is called before each copy. fails: called before each is taken on; what it raises is the edge's failure."""

    def __init__(
        self,
        *,
        num_chunks: int,
        chunk_bytes: int,
        delay: Callable[[], None] = lambda: None,
        fails: Callable[[], None] = lambda: None,
        waits_for: SoftEdge | None = None,
    ) -> None:
        self.chunks = torch.zeros((num_chunks, chunk_bytes), dtype=torch.uint8).unbind()
        self.num_sent = 0
        self._delay = delay
        self._fails = fails
        self._waits_for = waits_for
        self._told: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, after: Fence | None) -> None:
        if isinstance(after, Gate):
            self._told.put(after.finish)
        if self._waits_for is not None:
            self._told.put(self._waits_for.mark().finish)

    def send(self, target: torch.Tensor, chunk: torch.Tensor) -> _Arrived:
        self._fails()
        self.num_sent += 1

        def copy() -> None:
            self._delay()
            target.copy_(chunk)

        self._told.put(copy)
        return self.mark()

    def mark(self) -> _Arrived:
        there = _Arrived()
        self._told.put(there.set)
        return there

    def _run(self) -> None:
        while True:
            self._told.get()()


class SoftLink:
    """As `CudaLink`: urgent copies and prefetches on two streams, a fence passed at once, since a CPU has computed."""

    overlaps = True

    def __init__(self, urgent: SoftEdge, patient: SoftEdge, *, defers: bool) -> None:
        self.defers = defers
        self._urgent = urgent
        self._patient = patient
        self._fences = 0

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> Arrival:
        edge = self._urgent if urgent else self._patient
        edge.begin(after)
        try:
            for target, source in pairs:
                edge.send(target, source)
        except BaseException:
            edge.mark().finish()
            raise
        return edge.mark()

    def fence(self) -> Fence:
        self._fences += 1
        return _Mark(self._fences)

    def close(self) -> None:
        self._urgent.mark().finish()
        self._patient.mark().finish()


def soft_bounce(
    pinned: range,
    *,
    chunk_bytes: int,
    delay: Callable[[], None] = lambda: None,
    fails: Callable[[], None] = lambda: None,
    num_threads: int = 3,
    defers: bool = False,
) -> BounceLink:
    """A link, and rings that copy on its streams."""
    urgent = SoftEdge(num_chunks=3, chunk_bytes=chunk_bytes, delay=delay, fails=fails)
    patient = SoftEdge(num_chunks=2, chunk_bytes=chunk_bytes, delay=delay, fails=fails, waits_for=urgent)
    first = BounceRing(urgent, num_threads=num_threads, delay=delay)
    return BounceLink(
        SoftLink(urgent, patient, defers=defers),
        urgent=first,
        patient=BounceRing(patient, num_threads=1, yields_to=first, delay=delay),
        pinned=pinned,
    )
