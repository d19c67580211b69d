"""A GPU in software that computes later: streams of work in order, events, and copies beside the computing.

Nothing runs when it is told. Whoever waits for the device, or only speaks to it, lets some of it run: from streams
picked at random, so that what no event orders comes in any order. What a kernel reads it reads when it really runs.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workers.links import Fence, Pair, chunks_of
from workers.staging import Staging


class Event:
    """passed: whether its stream has come to it."""

    passed = False


# Returns whether it is done; it is asked again where it is not.
Work = Callable[[], bool]


class Device:
    """keenness: how likely each of its three streams is to be the next that goes on."""

    def __init__(self, rng: random.Random) -> None:
        self.compute: deque[Work] = deque()
        self.urgent: deque[Work] = deque()
        self.patient: deque[Work] = deque()
        self._rng = rng
        self._streams = (self.compute, self.urgent, self.patient)
        self._keenness = [rng.choice([0.02, 1.0, 1.0]) for _ in self._streams]
        self._pace = rng.choice([0, 1, 4])
        # A slab's readers wait for copies too.
        self._lock = threading.Lock()

    def launch(self, stream: deque[Work], work: Callable[[], object]) -> None:
        def done() -> bool:
            work()
            return True

        stream.append(done)
        self.go_on()

    def record(self, stream: deque[Work]) -> Event:
        event = Event()
        self.launch(stream, lambda: setattr(event, "passed", True))
        return event

    def wait_event(self, stream: deque[Work], event: Event) -> None:
        stream.append(lambda: event.passed)

    def go_on(self) -> None:
        """Some time passes."""
        for _ in range(self._rng.randint(0, self._pace)):
            self._step()

    def wait_for(self, event: Event) -> None:
        """The host waits."""
        while not event.passed:
            assert any(self._streams) or event.passed, "the host waits for ever"
            self._step()

    def synchronize(self) -> None:
        for stream in self._streams:
            self.wait_for(self.record(stream))

    def _step(self) -> None:
        with self._lock:
            (stream,) = self._rng.choices(self._streams, self._keenness)
            if stream and stream[0]():
                stream.popleft()


@dataclass(frozen=True, slots=True)
class StreamFence:
    event: Event
    number: int


class StreamArrival:
    def __init__(self, device: Device, event: Event, error: str | None = None) -> None:
        self._device = device
        self._event = event
        self._error = error

    def wait(self) -> None:
        self._check()
        self._device.wait_event(self._device.compute, self._event)

    def done(self) -> bool:
        self._device.go_on()
        return self._event.passed

    def finish(self) -> None:
        self._device.wait_for(self._event)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)


class StreamLink:
    """As `CudaLink`. breaks: asked of each batch, whether it is refused when half of it is submitted, or fails on its
    way, or neither. forgets_fences: the fault that tests are to find."""

    overlaps = True
    defers = True

    def __init__(
        self,
        device: Device,
        *,
        chunk_bytes: int,
        breaks: Callable[[], str] = lambda: "",
        forgets_fences: bool = False,
    ) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._breaks = breaks
        self._forgets_fences = forgets_fences
        self._last_urgent: Event | None = None
        self._fences = 0

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> StreamArrival:
        device = self._device
        stream = device.urgent if urgent else device.patient
        if isinstance(after, StreamFence) and not self._forgets_fences:
            device.wait_event(stream, after.event)
        if not urgent and self._last_urgent is not None:
            device.wait_event(stream, self._last_urgent)
        pieces = chunks_of(pairs, self._chunk_bytes)
        trouble = self._breaks()
        for target, source in pieces[: len(pieces) // 2] if trouble else pieces:
            device.launch(stream, lambda target=target, source=source: target.copy_(source))  # type: ignore[misc]
        event = device.record(stream)
        if trouble == "refused":
            device.wait_for(event)
            raise RuntimeError("a batch was refused")
        if urgent:
            self._last_urgent = event
        return StreamArrival(device, event, "a batch was lost" if trouble == "lost" else None)

    def fence(self) -> Fence:
        self._fences += 1
        return StreamFence(self._device.record(self._device.compute), self._fences)

    def close(self) -> None:
        self._device.synchronize()


class StreamStaging(Staging):
    """Staging as it is on a GPU whose kernels see pinned memory."""

    def __init__(self, device: Device, *, capacity: int) -> None:
        super().__init__(torch.device("cpu"), capacity=capacity)
        self._capacity = capacity
        self._pinned = torch.zeros(capacity, dtype=torch.int64)
        self._there = torch.zeros(capacity, dtype=torch.int64)
        self._seen = self._pinned
        self._streams = device

    def ids(self, ids: Sequence[int], *, meanwhile: Callable[[], None]) -> NDArray[np.int64]:
        """As `fetch` of ids on the device."""
        self.begin()
        meanwhile()
        self._streams.wait_for(self._streams.record(self._streams.compute))
        return np.array(ids, np.int64)

    def send(self, array: NDArray[np.int64]) -> torch.Tensor:
        views = self._reserve(array)
        if views is None:
            return torch.from_numpy(array.copy())
        views.written[...] = array
        self._streams.launch(self._streams.compute, lambda: views.there.copy_(views.here))
        return views.there
