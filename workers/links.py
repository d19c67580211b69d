"""Links: how blobs come from host memory into slots, beside the computing.

A link copies a *batch* of blobs as one submission and gives back an *arrival*, for which the computing waits just
before it needs the slots, never for anything else. A *fence* marks what the computing has been told to do so far; a
slot that it may still read is overwritten only behind its fence. Urgent batches (a layer waits for them) overtake the
others, which go in chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from workers.cuda_runtime import bare_submit

CHUNK_BYTES = 4 << 20
Pair = tuple[torch.Tensor, torch.Tensor]


class Arrival(Protocol):
    """A batch on its way. Where it fails, `wait` and `finish` raise RuntimeError."""

    def wait(self) -> None:
        """Let what is computed from now on come after the batch."""

    def done(self) -> bool:
        """Whether it is there already, or never will be."""

    def finish(self) -> None:
        """Return once it is there; the blobs may then be overwritten, as they may once it raised."""


class Fence(Protocol):
    """A mark in the computing; later ones have a higher number."""

    @property
    def number(self) -> int: ...


class Link(Protocol):
    """pairs: (slot, blob), both uint8 of one length. after: the newest fence of these slots, None if they have none.

    overlaps: whether copies run beside the computing. defers: whether computing is only set off when its caller goes
    on, as on a GPU. Where `copy` raises, nothing of the batch is copied any more.
    """

    overlaps: bool
    defers: bool

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> Arrival: ...

    def fence(self) -> Fence: ...

    def close(self) -> None: ...


def chunks_of(pairs: Sequence[Pair], chunk_bytes: int) -> list[Pair]:
    """The same copies in pieces of at most chunk_bytes."""
    pieces: list[Pair] = []
    for target, source in pairs:
        pieces += zip(torch.split(target, chunk_bytes), torch.split(source, chunk_bytes), strict=True)
    return pieces


def is_settled_well(arrival: Arrival) -> bool:
    """Wait until nothing is copied any more. Returns whether all of the batch is there."""
    try:
        arrival.finish()
    except RuntimeError:
        return False
    return True


class _Numbered:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        return


NOTHING_UNDER_WAY: Arrival = _Numbered(0)


class DirectLink:
    """Copies at once, in the caller: for experts and slots in the same memory."""

    overlaps = False
    defers = False

    def __init__(self) -> None:
        self._fences = 0

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> Arrival:
        for target, source in pairs:
            target.copy_(source)
        return _Numbered(0)

    def fence(self) -> Fence:
        self._fences += 1
        return _Numbered(self._fences)

    def close(self) -> None:
        return


class CudaArrival:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self._event.synchronize()


class _CudaFence:
    def __init__(self, event: torch.cuda.Event, number: int) -> None:
        self.event = event
        self.number = number


class CudaLink:
    """Two streams of one GPU: urgent copies with high priority, and prefetches in chunks.

    Copies of two streams share the link however urgent they are, so that a prefetch begins only once the urgent copies
    that were given before it have landed.

    A copy is given to the CUDA runtime itself where that can be had, since torch's way to it takes longer.
    """

    overlaps = True
    defers = True

    def __init__(self, device: torch.device) -> None:
        self.urgent = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.patient = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self._last_urgent: torch.cuda.Event | None = None
        self._fences = 0
        self._submit = bare_submit(device)

    def copy(self, pairs: Sequence[Pair], *, after: Any, urgent: bool) -> Arrival:
        stream = self.urgent if urgent else self.patient
        try:
            return self._copy(stream, pairs, after, urgent)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                stream.synchronize()
            raise

    def _copy(self, stream: torch.cuda.Stream, pairs: Sequence[Pair], after: Any, urgent: bool) -> Arrival:
        if after is not None:
            stream.wait_event(after.event)
        if not urgent and self._last_urgent is not None:
            stream.wait_event(self._last_urgent)
        if self._submit is not None:
            number = stream.cuda_stream
            for target, source in pairs:
                self._submit(target, source, number, source.numel() if urgent else CHUNK_BYTES)
        else:
            with torch.cuda.stream(stream):
                for target, source in pairs if urgent else chunks_of(pairs, CHUNK_BYTES):
                    target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        if urgent:
            self._last_urgent = event
        return CudaArrival(event)

    def fence(self) -> Fence:
        self._fences += 1
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaFence(event, self._fences)

    def close(self) -> None:
        self.urgent.synchronize()
        self.patient.synchronize()
