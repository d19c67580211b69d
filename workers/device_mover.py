"""The mover of ranks with GPUs: host memory -> GPU -> NCCL -> GPU -> host memory, several experts on the way at once.

Experts that follow each other in one direction travel as one parcel. Each part of a parcel's way runs on a stream of
its own through a ring of buffers on the GPU, so that the slowest of them, the host link, is never idle. The GPUs add
checksums up and compare them, and the host publishes a blob when its copy is there.

Both ends agree on a parcel (`workers/handshake.py`) before NCCL's kernels start on both GPUs: a kernel that waits for
its other end takes room from those that serve. With a cap they agree when the parcel lies on the sender's GPU, so that
nothing waits longer than it takes; without one before it is loaded, so that the link need not wait for them.
Whatever waits for the whole GPU waits for such a kernel too, and two ranks that do so at the same time would hang. So
all that waits for the GPU is done before ranks serve: buffers, kernels, connections (`Group.connect`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch

from placement.errors import DiskError, ExchangeError, MigrationError, MoetisError
from placement.migration import Move
from workers.group import Group
from workers.handshake import Handshake, failed
from workers.host_slab import HostSlab
from workers.mover import Pace, wrong_checksum
from workers.parcels import HEAD_BYTES, RING, Loading, Parcel, ParcelRing, blobs_in_parcel, parcels

# A parcel takes milliseconds. One that stands still may hold up who serves; its kernels are ended then.
STALL_S = 10.0
# So many wait for their turn, loaded or being loaded, where nothing holds the link back.
MOST_LOADING = 2
logger = logging.getLogger(__name__)
# Each look takes the interpreter from the thread that serves, so looks become rarer; not where speed is what counts.
FIRST_LOOK_S, LONGEST_LOOK_S, LONGEST_UNCAPPED_S, SLOWER, LAST_LOOK_S = 2e-4, 8e-3, 3e-4, 1.5, 5.0


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
        self._rank = rank
        self._blob_bytes = blob_bytes
        self._timeout_s = timeout_s
        self._num_blobs = blobs_in_parcel(blob_bytes)
        # Rows are claimed for what is under way: a slab that is smaller than what the rank owns must not run out.
        self._most_parcels = max(1, min(RING, slab.num_rows // (3 * self._num_blobs)))
        self._handshake = Handshake(signals, rank=rank, most=self._most_parcels)
        self._is_capped = max_bytes_per_s is not None
        self._pace = Pace(blob_bytes, max_bytes_per_s)
        self._ring = ParcelRing(blob_bytes, self._num_blobs, device)

    def copy_round(self, epoch: int, moves: Sequence[Move]) -> int:
        """Do this rank's moves of a round to an epoch, in order. Returns the bytes received.

        Raises MigrationError, and StaleEpochError where a peer moves to another epoch.
        """
        loading: deque[Loading] = deque()
        under_way: deque[Parcel] = deque()
        received = 0
        spoiled: list[Move] = []
        # How many parcels both ends can have begun. Neither begins another before it has passed on all but so many.
        most = self._most_parcels
        try:
            for number, moved in enumerate(parcels(moves, self._rank, self._num_blobs)):
                while loading and len(loading) >= min(most, 1 if self._is_capped else MOST_LOADING):
                    under_way.append(self._pass_on(loading[0]))
                    loading.popleft()
                while len(under_way) + len(loading) >= self._most_parcels:
                    received += self._finish(under_way[0], spoiled)
                    under_way.popleft()
                loading.append(self._load(epoch, moved, number % RING))
                most = min(most, loading[-1].most)
            self._pass_all(loading, under_way)
            while under_way:
                received += self._finish(under_way[0], spoiled)
                under_way.popleft()
        except MoetisError:
            # The other end counts on what was agreed.
            with suppress(MigrationError):
                self._pass_all(loading, under_way)
            raise
        finally:
            for each in loading:
                self._let_go(each)
                self._release(each.moves, each.rows)
            self._give_up(under_way)
        if spoiled:
            # Its sender does not know: the round went on as both ends expected.
            raise wrong_checksum(spoiled[0])
        return received

    def _pass_all(self, loading: deque[Loading], under_way: deque[Parcel]) -> None:
        while loading:
            under_way.append(self._pass_on(loading[0]))
            loading.popleft()

    def _load(self, epoch: int, moves: Sequence[Move], buffer: int) -> Loading:
        """Begin a parcel: of one that is sent, its blobs are on their way to the GPU; of one that comes, rows wait."""
        if moves[0].source.rank != self._rank:
            rows, most = self._handshake.take(epoch, moves[0], lambda: self._claim(moves))
            return Loading(moves=moves, buffer=buffer, most=most, rows=rows)
        ring, most = self._ring, self._most_parcels
        with ExitStack() as held, torch.cuda.stream(ring.up):
            try:
                blobs = [self._hold(held, move) for move in moves]
            except MigrationError:
                self._handshake.withhold(moves[0])
                raise
            if not self._is_capped:
                most = self._handshake.offer(epoch, moves[0])
            for row, blob in zip(ring.buffers[buffer], blobs, strict=False):
                # One by one, so that who serves never waits for more than one of them.
                self._pace.keep()
                row[HEAD_BYTES:].copy_(blob, non_blocking=True)
            loaded = _mark(ring.up)
            if self._is_capped:
                loaded.synchronize()
                most = self._handshake.offer(epoch, moves[0])
            return Loading(moves=moves, buffer=buffer, most=most, loaded=loaded, held=held.pop_all())

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

    def _pass_on(self, parcel: Loading) -> Parcel:
        self._let_go(parcel)
        try:
            return self._receive(parcel) if parcel.loaded is None else self._send(parcel)
        except ExchangeError as error:
            raise failed(parcel.moves[0], error) from error

    def _send(self, parcel: Loading) -> Parcel:
        ring, buffer, count = self._ring, parcel.buffer, len(parcel.moves)
        with torch.cuda.stream(ring.wire):
            ring.add_up(buffer, count, 0)
            self._group.send(ring.buffers[buffer, :count], parcel.moves[0].target.rank)
            return Parcel(moves=parcel.moves, buffer=buffer, over=_mark(ring.wire), rows=())

    def _receive(self, parcel: Loading) -> Parcel:
        ring, buffer, count = self._ring, parcel.buffer, len(parcel.moves)
        with torch.cuda.stream(ring.wire):
            self._group.receive(ring.buffers[buffer, :count], parcel.moves[0].source.rank)
            ring.add_up(buffer, count, 1)
            there = _mark(ring.wire)
        with torch.cuda.stream(ring.down):
            ring.down.wait_event(there)
            for row, came in zip(parcel.rows, ring.buffers[buffer], strict=False):
                if row is not None:
                    row.copy_(came[HEAD_BYTES:], non_blocking=True)
            ring.heads[buffer, :count].copy_(ring.head(buffer, count), non_blocking=True)
            return Parcel(moves=parcel.moves, buffer=buffer, over=_mark(ring.down), rows=parcel.rows)

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

    def _finish(self, parcel: Parcel, spoiled: list[Move]) -> int:
        """Wait for a parcel and publish what came whole; its bytes, without those that were here already. What came
        with a wrong checksum goes to `spoiled`."""
        self._wait(parcel)
        heads, came = self._ring.heads[parcel.buffer].tolist(), 0
        for move, row, (expected, found) in zip(parcel.moves, parcel.rows, heads, strict=False):
            if row is None:
                continue
            if expected == found:
                self._slab.publish(move.expert)
                came += 1
            else:
                self._slab.release(move.expert)
                spoiled.append(move)
        return came * self._blob_bytes

    def _wait(self, parcel: Parcel) -> None:
        deadline, pause_s = time.monotonic() + min(self._timeout_s, STALL_S), FIRST_LOOK_S
        while not parcel.over.query():  # type: ignore[no-untyped-call]
            if self._group.has_left:
                break
            if time.monotonic() > deadline:
                logger.warning("%s stands still on its way: transfers are broken off, serving goes on", parcel.moves[0])
                self._group.leave()
                break
            time.sleep(pause_s)
            pause_s = min(LONGEST_LOOK_S if self._is_capped else LONGEST_UNCAPPED_S, pause_s * SLOWER)
        if self._group.has_left:
            # What NCCL breaks off looks done on its stream.
            why = "the transfer was broken off; experts move again once the ranks have met anew"
            raise failed(parcel.moves[0], ExchangeError(why))

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
