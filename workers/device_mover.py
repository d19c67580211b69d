"""The mover of ranks with GPUs: host memory -> GPU -> NCCL -> GPU -> host memory, several experts on the way at once.

Experts that follow each other in one direction travel as one parcel. Each part of a parcel's way runs on a stream of
its own through a ring of buffers on the GPU, so that the slowest of them, the host link, is never idle. The GPUs add
checksums up and compare them, and the host publishes a blob when its copy is there.

Both ends agree on a parcel over gloo once it lies on the sender's GPU: the epoch, and a yes. Only then NCCL's kernels
start, on both GPUs at about the same time. A kernel that waits for its other end takes room from those that serve, and
whatever waits for the whole GPU meanwhile waits for it; two ranks that do so at the same time would hang. So all that
waits for the GPU is done before ranks serve: buffers, kernels, connections (`Group.connect`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from placement.errors import DiskError, ExchangeError, MigrationError, MoetisError, StaleEpochError
from placement.migration import Move
from workers.group import Group
from workers.host_slab import HostSlab
from workers.mover import EPOCH_BYTES, NOTHING_COMES, Pace
from workers.parcels import HEAD_BYTES, RING, Loading, Parcel, ParcelRing, blobs_in_parcel, parcels

NO, YES = 0, 1
# Each look takes the interpreter from the thread that serves, so looks become rarer.
FIRST_LOOK_S, LONGEST_LOOK_S, SLOWER, LAST_LOOK_S = 2e-4, 8e-3, 1.5, 5.0


class DeviceMover:
    """Copies blobs between host slabs over an NCCL group of its own. One round at a time.

    Made before the rank serves. signals: a gloo group of its own. timeout_s: how long a parcel may take.
    max_bytes_per_s: as for `Mover`. Blobs are multiples of 8 bytes.
    """

    def __init__(
        self,
        slab: HostSlab,
        *,
        group: Group,
        signals: Group,
        rank: int,
        blob_bytes: int,
        device: torch.device,
        timeout_s: float,
        max_bytes_per_s: float | None = None,
    ) -> None:
        self._slab = slab
        self._group = group
        self._signals = signals
        self._rank = rank
        self._blob_bytes = blob_bytes
        self._timeout_s = timeout_s
        self._num_blobs = blobs_in_parcel(blob_bytes)
        # Rows are claimed for what is under way: a slab that is smaller than what the rank owns must not run out.
        self._most_parcels = max(1, min(RING, slab.num_rows // (3 * self._num_blobs)))
        # With a cap the link has time: a parcel is passed on before the next one waits for its turn.
        self._most_loading = 2 if max_bytes_per_s is None and self._most_parcels > 1 else 1
        self._pace = Pace(blob_bytes, max_bytes_per_s)
        self._ring = ParcelRing(blob_bytes, self._num_blobs, device)

    def copy_round(self, epoch: int, moves: Sequence[Move]) -> int:
        """Do this rank's moves of a round to an epoch, in order. Returns the bytes received.

        Raises MigrationError, and StaleEpochError where a peer moves to another epoch.
        """
        loading: deque[Loading] = deque()
        under_way: deque[Parcel] = deque()
        received = 0
        try:
            for number, parcel in enumerate(parcels(moves, self._rank, self._num_blobs)):
                while len(under_way) + len(loading) >= self._most_parcels:
                    if not under_way:
                        under_way.append(self._pass_on(epoch, loading[0]))
                        loading.popleft()
                    received += self._finish(under_way[0])
                    under_way.popleft()
                loading.append(self._load(parcel, number % RING))
                # What comes waits only where something that goes is being loaded in front of it.
                while loading and sum(each.loaded is not None for each in loading) in (0, self._most_loading):
                    under_way.append(self._pass_on(epoch, loading[0]))
                    loading.popleft()
            while loading:
                under_way.append(self._pass_on(epoch, loading[0]))
                loading.popleft()
            while under_way:
                received += self._finish(under_way[0])
                under_way.popleft()
        finally:
            for each in loading:
                self._let_go(each)
            self._give_up(under_way)
        return received

    def _load(self, moves: Sequence[Move], buffer: int) -> Loading:
        ring, held = self._ring, ExitStack()
        if moves[0].source.rank != self._rank:
            return Loading(moves=moves, buffer=buffer, held=held, loaded=None)
        with held, torch.cuda.stream(ring.up):
            try:
                for row, move in zip(ring.buffers[buffer], moves, strict=False):
                    # One by one, so that who serves never waits for more than one of them.
                    self._pace.keep()
                    row[HEAD_BYTES:].copy_(self._hold(held, move), non_blocking=True)
            except MigrationError:
                ring.up.synchronize()
                self._signal(NOTHING_COMES, moves[0].target.rank)
                raise
            return Loading(moves=moves, buffer=buffer, loaded=_mark(ring.up), held=held.pop_all())

    def _hold(self, held: ExitStack, move: Move) -> torch.Tensor:
        try:
            return held.enter_context(self._slab.holding(move.expert))
        except (KeyError, DiskError) as error:
            raise MigrationError(f"rank {self._rank} has no copy of {move.expert} to send: {error}") from error

    @staticmethod
    def _let_go(parcel: Loading) -> None:
        """Until its blobs are on the GPU they must stay where they are."""
        if parcel.loaded is not None:
            parcel.loaded.synchronize()
        parcel.held.close()

    def _pass_on(self, epoch: int, parcel: Loading) -> Parcel:
        self._let_go(parcel)
        try:
            if parcel.loaded is None:
                return self._receive(epoch, parcel.moves, parcel.buffer)
            return self._send(epoch, parcel.moves, parcel.buffer)
        except ExchangeError as error:
            raise _failed(parcel.moves, error) from error

    def _send(self, epoch: int, moves: Sequence[Move], buffer: int) -> Parcel:
        ring, count, target = self._ring, len(moves), moves[0].target.rank
        said = torch.zeros(1, dtype=torch.uint8)
        self._signal(epoch, target)
        self._signals.receive(said, target)
        if int(said) != YES:
            raise MigrationError(f"rank {target} does not take {moves[0].expert} for epoch {epoch}")
        with torch.cuda.stream(ring.wire):
            ring.add_up(buffer, count, 0)
            self._group.send(ring.buffers[buffer, :count], target)
            return Parcel(moves=moves, buffer=buffer, over=_mark(ring.wire), rows=[None] * count)

    def _signal(self, epoch: int, target: int) -> None:
        head = torch.frombuffer(bytearray(epoch.to_bytes(EPOCH_BYTES, "big")), dtype=torch.uint8)
        self._signals.send(head, target)

    def _receive(self, epoch: int, moves: Sequence[Move], buffer: int) -> Parcel:
        ring, count, source = self._ring, len(moves), moves[0].source.rank
        rows = self._agree(epoch, moves)
        try:
            with torch.cuda.stream(ring.wire):
                self._group.receive(ring.buffers[buffer, :count], source)
                ring.add_up(buffer, count, 1)
                there = _mark(ring.wire)
        except ExchangeError:
            self._release(moves, rows)
            raise
        with torch.cuda.stream(ring.down):
            ring.down.wait_event(there)
            for row, came in zip(rows, ring.buffers[buffer], strict=False):
                if row is not None:
                    row.copy_(came[HEAD_BYTES:], non_blocking=True)
            ring.heads[buffer, :count].copy_(ring.head(buffer, count), non_blocking=True)
            return Parcel(moves=moves, buffer=buffer, over=_mark(ring.down), rows=rows)

    def _agree(self, epoch: int, moves: Sequence[Move]) -> list[torch.Tensor | None]:
        """Rows for a parcel that its sender has ready, once this rank has said yes."""
        source = moves[0].source.rank
        head = torch.empty(EPOCH_BYTES, dtype=torch.uint8)
        self._signals.receive(head, source)
        theirs = int.from_bytes(head.numpy().tobytes(), "big")
        if theirs == NOTHING_COMES:
            raise MigrationError(f"rank {source} has not got all of the experts that it was to send: {moves[0].expert}")
        try:
            if theirs != epoch:
                raise StaleEpochError(
                    f"rank {self._rank} moves to epoch {epoch}, but rank {source} sends for epoch {theirs}"
                )
            rows = self._claim(moves)
        except MoetisError:
            self._answer(NO, source)
            raise
        self._answer(YES, source)
        return rows

    def _answer(self, answer: int, source: int) -> None:
        self._signals.send(torch.tensor([answer], dtype=torch.uint8), source)

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

    def _finish(self, parcel: Parcel) -> int:
        """Wait for a parcel and publish what came; its bytes, without those that were here already."""
        self._wait(parcel)
        if parcel.moves[0].source.rank == self._rank:
            return 0
        for move, (expected, found) in zip(parcel.moves, self._ring.heads[parcel.buffer].tolist(), strict=False):
            if expected != found:
                raise MigrationError(f"{move.expert} arrived from rank {move.source.rank} with a wrong checksum")
        new = [move for move, row in zip(parcel.moves, parcel.rows, strict=True) if row is not None]
        for move in new:
            self._slab.publish(move.expert)
        return len(new) * self._blob_bytes

    def _wait(self, parcel: Parcel) -> None:
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

    def _give_up(self, under_way: deque[Parcel]) -> None:
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


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that puts who waits for it to sleep, rather than to spin."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _failed(moves: Sequence[Move], error: ExchangeError) -> MigrationError:
    return MigrationError(f"copying {moves[0].expert} to rank {moves[0].target.rank} failed: {error}")
