"""The mover of ranks with GPUs: host memory -> GPU -> NCCL -> GPU -> host memory, several experts on the way at once.

Experts that follow each other in one direction travel as one parcel. Each part of a parcel's way runs on a stream of
its own through a ring of buffers on the GPU, so that the slowest of them, the host link, is never idle. A message is
what `Mover` sends: an epoch, checksums and blobs; here the GPUs add the checksums up and compare them, and the host
publishes a blob when its copy is there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest

import torch

from placement.errors import DiskError, ExchangeError, MigrationError, StaleEpochError
from placement.migration import Move
from workers.host_slab import HostSlab
from workers.mover import Pace
from workers.peers import Group

RING = 4
PARCEL_BYTES, MOST_BLOBS = 64 << 20, 8
# In front of each blob, as much as blobs are aligned to: epoch, checksum as sent, checksum as it came.
HEAD_BYTES = 256
# Each look takes the interpreter from the thread that serves, so looks become rarer.
FIRST_LOOK_S, LONGEST_LOOK_S, SLOWER, LAST_LOOK_S = 1e-3, 8e-3, 1.5, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parcel:
    """Moves of one direction on their way in a buffer of the ring. over: when they are there, or gone. rows: where they
    are to be published, None for one that is sent, or known here already."""

    moves: Sequence[Move]
    buffer: int
    over: torch.cuda.Event
    rows: Sequence[torch.Tensor | None]


class _Ring:
    """Buffers [RING, n, HEAD_BYTES + blob_bytes] on the GPU, and the streams of a parcel's way."""

    def __init__(self, blob_bytes: int, num_blobs: int, device: torch.device) -> None:
        self.buffers = torch.empty((RING, num_blobs, HEAD_BYTES + blob_bytes), dtype=torch.uint8, device=device)
        self.heads = torch.zeros((RING, num_blobs, 3), dtype=torch.int64).pin_memory()
        # Odd, so that no change of one word goes unseen; another one for each word, so that no two can change places.
        self._factors = torch.arange(blob_bytes // 8, device=device, dtype=torch.int64) * (2 * 0x9E3779B9) + 1
        self.up, self.wire, self.down = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]

    def head(self, buffer: int, count: int) -> torch.Tensor:
        """[count, 3] int64: epoch, checksum as sent, checksum as it came."""
        return self.buffers[buffer, :count, :24].view(torch.int64)

    def sums(self, buffer: int, count: int) -> torch.Tensor:
        """[count]: a checksum of each blob."""
        return (self.buffers[buffer, :count, HEAD_BYTES:].view(torch.int64) * self._factors).sum(dim=1)


class DeviceMover:
    """Copies blobs between host slabs over an NCCL group of its own. One round at a time.

    timeout_s: how long a parcel may take. max_bytes_per_s: as for `Mover`. Blobs are multiples of 8 bytes.
    """

    def __init__(
        self,
        slab: HostSlab,
        *,
        group: Group,
        rank: int,
        blob_bytes: int,
        device: torch.device,
        timeout_s: float,
        max_bytes_per_s: float | None = None,
    ) -> None:
        self._slab = slab
        self._group = group
        self._rank = rank
        self._blob_bytes = blob_bytes
        self._device = device
        self._timeout_s = timeout_s
        self._num_blobs = max(1, min(MOST_BLOBS, PARCEL_BYTES // blob_bytes))
        # Rows are claimed for what is under way: a slab that is smaller than what the rank owns must not run out.
        self._most_parcels = max(1, min(RING, slab.num_rows // (3 * self._num_blobs)))
        self._pace = Pace(blob_bytes, max_bytes_per_s)
        self._made: _Ring | None = None

    def copy_round(self, epoch: int, moves: Sequence[Move]) -> int:
        """Do this rank's moves of a round to an epoch, in order. Returns the bytes received.

        Raises MigrationError, and StaleEpochError where a peer moves to another epoch.
        """
        under_way: deque[_Parcel] = deque()
        received = 0
        try:
            for number, parcel in enumerate(parcels(moves, self._rank, self._num_blobs)):
                if len(under_way) == self._most_parcels:
                    received += self._finish(epoch, under_way[0])
                    under_way.popleft()
                begin = self._send if parcel[0].source.rank == self._rank else self._receive
                under_way.append(begin(epoch, parcel, number % RING))
            while under_way:
                received += self._finish(epoch, under_way[0])
                under_way.popleft()
        finally:
            self._give_up(under_way)
        return received

    @property
    def _ring(self) -> _Ring:
        """Made once something moves: a worker that never migrates keeps the memory."""
        if self._made is None:
            self._made = _Ring(self._blob_bytes, self._num_blobs, self._device)
        return self._made

    def _send(self, epoch: int, moves: Sequence[Move], buffer: int) -> _Parcel:
        ring, count = self._ring, len(moves)
        for _ in moves:
            self._pace.keep()
        with ExitStack() as held:
            blobs = [self._hold(held, move) for move in moves]
            with torch.cuda.stream(ring.up):
                for row, blob in zip(ring.buffers[buffer], blobs, strict=False):
                    row[HEAD_BYTES:].copy_(blob, non_blocking=True)
                loaded = _mark(ring.up)
            with torch.cuda.stream(ring.wire):
                ring.wire.wait_event(loaded)
                head = ring.head(buffer, count)
                head[:, 0] = epoch
                head[:, 1] = ring.sums(buffer, count)
                try:
                    self._group.send(ring.buffers[buffer, :count], moves[0].target.rank)
                except ExchangeError as error:
                    raise _failed(moves, error) from error
                finally:
                    # Until then the blobs must stay where they are.
                    loaded.synchronize()
                return _Parcel(moves=moves, buffer=buffer, over=_mark(ring.wire), rows=[None] * count)

    def _hold(self, held: ExitStack, move: Move) -> torch.Tensor:
        try:
            return held.enter_context(self._slab.holding(move.expert))
        except (KeyError, DiskError) as error:
            raise MigrationError(f"rank {self._rank} has no copy of {move.expert} to send: {error}") from error

    def _receive(self, _epoch: int, moves: Sequence[Move], buffer: int) -> _Parcel:
        ring, count = self._ring, len(moves)
        rows = self._claim(moves)
        try:
            with torch.cuda.stream(ring.wire):
                self._group.receive(ring.buffers[buffer, :count], moves[0].source.rank)
                head = ring.head(buffer, count)
                head[:, 2] = ring.sums(buffer, count)
                there = _mark(ring.wire)
        except ExchangeError as error:
            self._release(moves, rows)
            raise _failed(moves, error) from error
        with torch.cuda.stream(ring.down):
            ring.down.wait_event(there)
            for row, came in zip(rows, ring.buffers[buffer], strict=False):
                if row is not None:
                    row.copy_(came[HEAD_BYTES:], non_blocking=True)
            ring.heads[buffer, :count].copy_(head, non_blocking=True)
            return _Parcel(moves=moves, buffer=buffer, over=_mark(ring.down), rows=rows)

    def _claim(self, moves: Sequence[Move]) -> list[torch.Tensor | None]:
        """A row for each expert that is not here yet."""
        here = self._slab.experts()
        rows: list[torch.Tensor | None] = []
        try:
            for move in moves:
                rows.append(None if move.expert in here else self._slab.claim(move.expert))
        except MigrationError:
            self._release(moves, rows)
            raise
        return rows

    def _finish(self, epoch: int, parcel: _Parcel) -> int:
        """Wait for a parcel and publish what came; its bytes, without those that were here already."""
        self._wait(parcel)
        if parcel.moves[0].source.rank == self._rank:
            return 0
        self._check(epoch, parcel)
        new = [move for move, row in zip(parcel.moves, parcel.rows, strict=True) if row is not None]
        for move in new:
            self._slab.publish(move.expert)
        return len(new) * self._blob_bytes

    def _wait(self, parcel: _Parcel) -> None:
        deadline, pause_s = time.monotonic() + self._timeout_s, FIRST_LOOK_S
        while not parcel.over.query():  # type: ignore[no-untyped-call]
            if self._group.has_left:
                break
            if time.monotonic() > deadline:
                raise _failed(parcel.moves, ExchangeError("the peers do not answer"))
            time.sleep(pause_s)
            pause_s = min(LONGEST_LOOK_S, pause_s * SLOWER)
        try:
            # What NCCL breaks off looks done on its stream.
            self._group.check()
        except ExchangeError as error:
            raise _failed(parcel.moves, error) from error

    def _check(self, epoch: int, parcel: _Parcel) -> None:
        for move, (theirs, expected, found) in zip(
            parcel.moves, self._ring.heads[parcel.buffer].tolist(), strict=False
        ):
            source = move.source.rank
            if theirs != epoch:
                raise StaleEpochError(
                    f"rank {self._rank} moves to epoch {epoch}, but rank {source} sends for epoch {theirs}"
                )
            if expected != found:
                raise MigrationError(f"{move.expert} arrived from rank {source} with a wrong checksum")

    def _give_up(self, under_way: deque[_Parcel]) -> None:
        """After a failure: a row comes back once nothing can land there any more, or not before the ranks form anew."""
        deadline = time.monotonic() + LAST_LOOK_S
        for parcel in under_way:
            while not parcel.over.query() and time.monotonic() < deadline:  # type: ignore[no-untyped-call]
                time.sleep(FIRST_LOOK_S)
            if parcel.over.query():  # type: ignore[no-untyped-call]
                self._release(parcel.moves, parcel.rows)

    def _release(self, moves: Sequence[Move], rows: Sequence[torch.Tensor | None]) -> None:
        for move, row in zip(moves, rows, strict=False):
            if row is not None:
                self._slab.release(move.expert)


def parcels(moves: Sequence[Move], rank: int, most: int) -> list[tuple[Move, ...]]:
    """A rank's moves of a round in parcels of one direction, at most `most` in each; the directions take turns, so that
    both ways of the host link are used. Alike on both ends of a pair."""
    own = [move for move in moves if rank in (move.source.rank, move.target.rank)]
    ways = [[move for move in own if move.source.rank == source] for source in sorted({m.source.rank for m in own})]
    cut = [[tuple(way[start : start + most]) for start in range(0, len(way), most)] for way in ways]
    return [parcel for turn in zip_longest(*cut) for parcel in turn if parcel is not None]


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _failed(moves: Sequence[Move], error: ExchangeError) -> MigrationError:
    return MigrationError(f"copying {moves[0].expert} to rank {moves[0].target.rank} failed: {error}")
