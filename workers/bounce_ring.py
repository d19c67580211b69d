"""A ring of chunks between memory that a GPU cannot read at full speed and the GPU.

Threads fill the chunks, so that who asks is not held up; an *edge* takes each chunk on to where it belongs, while the
next are filled. Nothing here knows of GPUs: the edge may be one, or a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from workers.links import Arrival, Fence, Pair

PAGE = 4096


class Edge(Protocol):
    """Where chunks go on, in the order in which they are sent. One thread at a time calls it."""

    @property
    def chunks(self) -> Sequence[torch.Tensor]:
        """uint8, of one size, in memory from which it copies fast."""

    def begin(self, after: Fence | None) -> None:
        """What is sent from now on comes after the fence."""

    def send(self, target: torch.Tensor, chunk: torch.Tensor) -> Arrival:
        """Set off a copy. Once it and all that was sent before it are there, the arrival is done: until then the chunk
        is read."""


@dataclass(slots=True)
class _Batch:
    """left: how many pieces nobody has taken."""

    pieces: Iterator[Pair]
    left: int
    after: Fence | None
    has_begun: bool = False
    last: Arrival | None = None
    carriers: list[Future[None]] = field(default_factory=list)


class Bounced:
    """The arrival of a batch. Where a thread failed, whoever waits for it gets a RuntimeError, once no thread touches
    the batch any more and what was sent of it is there."""

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch

    def wait(self) -> None:
        self._submitted().wait()

    def done(self) -> bool:
        if not self.is_submitted():
            return False
        last = self._batch.last
        return last is None or last.done()

    def finish(self) -> None:
        self._submitted().finish()

    def is_submitted(self) -> bool:
        """Whether all of it is with the edge, or never will be."""
        return all(carrier.done() for carrier in self._batch.carriers)

    def settle(self) -> None:
        """Return once it is submitted, or never will be."""
        for carrier in self._batch.carriers:
            carrier.exception()

    def _submitted(self) -> Arrival:
        """The arrival of what was sent last: an edge knows of none before it was told."""
        errors = [error for carrier in self._batch.carriers if (error := carrier.exception()) is not None]
        if errors:
            if self._batch.last is not None:
                self._batch.last.finish()
            raise RuntimeError(f"experts were lost on their way through the bounce ring: {errors[0]}") from errors[0]
        assert self._batch.last is not None
        return self._batch.last


class BounceRing:
    """First come, first served. A chunk is overwritten once what it held has arrived.

    yields_to: a ring that goes first; nothing of this one is begun while that one has something left to submit.
    delay is called before each chunk is filled; tests let it sleep at random, or fail.
    """

    def __init__(
        self,
        edge: Edge,
        *,
        num_threads: int,
        yields_to: BounceRing | None = None,
        delay: Callable[[], None] = lambda: None,
    ) -> None:
        self._edge = edge
        self._num_threads = num_threads
        self._yields_to = yields_to
        self._delay = delay
        self._chunk_bytes = len(edge.chunks[0])
        # Each chunk that nobody fills, the oldest first, with the arrival of what it held.
        self._free: SimpleQueue[tuple[torch.Tensor, Arrival | None]] = SimpleQueue()
        for chunk in edge.chunks:
            self._free.put((chunk, None))
        self._left = 0
        self._changed = threading.Condition()
        self._submitting = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bounce")

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None) -> Bounced:
        """Pairs as for a link; at least one. RuntimeError once the ring is closed."""
        size = self._chunk_bytes
        batch = _Batch(pieces_of(pairs, size), sum(count_pieces(len(source), size) for _, source in pairs), after)
        with self._changed:
            self._left += batch.left
            try:
                for _ in range(min(self._num_threads, batch.left)):
                    batch.carriers.append(self._pool.submit(self._carry, batch))
            except BaseException:
                self._give_up(batch)
                raise
        return Bounced(batch)

    def close(self) -> None:
        """End the threads, when all that was given is submitted."""
        self._pool.shutdown(wait=True)

    def _carry(self, batch: _Batch) -> None:
        try:
            while (piece := self._next(batch)) is not None:
                self._pass_on(batch, *piece)
        except BaseException:
            with self._changed:
                self._give_up(batch)
            raise

    def _give_up(self, batch: _Batch) -> None:
        """Nobody takes another piece. Under the lock."""
        self._count_off(batch.left)
        batch.pieces, batch.left = iter(()), 0

    def _next(self, batch: _Batch) -> Pair | None:
        if self._yields_to is not None:
            self._yields_to.wait_until_submitted()
        with self._changed:
            piece = next(batch.pieces, None)
            if piece is not None:
                batch.left -= 1
            return piece

    def _pass_on(self, batch: _Batch, target: torch.Tensor, source: torch.Tensor) -> None:
        chunk, sent = self._free.get()
        try:
            if sent is not None:
                sent.finish()
            self._delay()
            filled = chunk[: len(source)]
            # NumPy's copy lets go of the interpreter, and takes this thread alone.
            np.copyto(filled.numpy(), source.numpy())
            with self._submitting:
                if not batch.has_begun:
                    self._edge.begin(batch.after)
                    batch.has_begun = True
                batch.last = sent = self._edge.send(target, filled)
        finally:
            self._free.put((chunk, sent))
            with self._changed:
                self._count_off(1)

    def _count_off(self, count: int) -> None:
        self._left -= count
        if not self._left:
            self._changed.notify_all()

    def wait_until_submitted(self) -> None:
        """Return when nothing of what was given is left to submit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)


def count_pieces(num_bytes: int, chunk_bytes: int) -> int:
    """The pieces of a blob."""
    return -(-num_bytes // chunk_bytes)


def pieces_of(pairs: Sequence[Pair], chunk_bytes: int) -> Iterator[Pair]:
    """The same copies in pieces that fit a chunk, each blob's of one size but the last, of whole pages if they can."""
    for target, source in pairs:
        pages = -(-len(source) // (count_pieces(len(source), chunk_bytes) * PAGE))
        size = min(chunk_bytes, pages * PAGE)
        yield from zip(torch.split(target, size), torch.split(source, size), strict=True)
