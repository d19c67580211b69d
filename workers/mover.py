"""The mover: this rank's part in copying experts between ranks, beside the serving traffic.

A round gives each rank one peer at most. Both ends walk the round's moves in the same order, so each knows whether it
sends or receives next. A message is an epoch, a checksum and a blob: it counts only where the receiver waits for that
very epoch and has checked the blob.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from placement.errors import DiskError, ExchangeError, MigrationError, StaleEpochError
from placement.migration import Move
from workers.host_slab import HostSlab, checksum
from workers.peers import Group

EPOCH_BYTES, CHECKSUM_BYTES = 8, 16
HEAD_BYTES = EPOCH_BYTES + CHECKSUM_BYTES


class Mover:
    """Copies blobs between host slabs over a group of its own. One round at a time.

    max_bytes_per_s: what this rank sends at most, so that weights leave room for the traffic; None is no limit.
    """

    def __init__(
        self, slab: HostSlab, *, group: Group, rank: int, blob_bytes: int, max_bytes_per_s: float | None = None
    ) -> None:
        self._slab = slab
        self._group = group
        self._rank = rank
        self._blob_bytes = blob_bytes
        self._pause_s = 0.0 if max_bytes_per_s is None else blob_bytes / max_bytes_per_s
        self._next_send = 0.0

    def copy_round(self, epoch: int, moves: Sequence[Move]) -> int:
        """Do this rank's moves of a round to an epoch, in order. Returns the bytes received.

        Raises MigrationError, and StaleEpochError where a peer moves to another epoch.
        """
        received = 0
        for move in moves:
            try:
                if move.source.rank == self._rank:
                    self._send(epoch, move)
                elif move.target.rank == self._rank:
                    received += self._receive(epoch, move)
            except ExchangeError as error:
                raise MigrationError(f"copying {move.expert} to rank {move.target.rank} failed: {error}") from error
        return received

    def _send(self, epoch: int, move: Move) -> None:
        self._keep_pace()
        try:
            with self._slab.holding(move.expert) as blob:
                head = epoch.to_bytes(EPOCH_BYTES, "big") + checksum(blob)
                message = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), blob])
        except (KeyError, DiskError) as error:
            raise MigrationError(f"rank {self._rank} has no copy of {move.expert} to send: {error}") from error
        self._group.send(message, move.target.rank)

    def _keep_pace(self) -> None:
        now = time.monotonic()
        if self._next_send > now:
            time.sleep(self._next_send - now)
        self._next_send = max(now, self._next_send) + self._pause_s

    def _receive(self, epoch: int, move: Move) -> int:
        """The bytes that came: none where the expert is here already, as it may be after a move that was broken off."""
        message = torch.empty(HEAD_BYTES + self._blob_bytes, dtype=torch.uint8)
        self._group.receive(message, move.source.rank)
        head = message[:HEAD_BYTES].numpy().tobytes()
        theirs = int.from_bytes(head[:EPOCH_BYTES], "big")
        if theirs != epoch:
            raise StaleEpochError(
                f"rank {self._rank} moves to epoch {epoch}, but rank {move.source.rank} sends for epoch {theirs}"
            )
        if checksum(message[HEAD_BYTES:]) != head[EPOCH_BYTES:]:
            raise MigrationError(f"{move.expert} arrived from rank {move.source.rank} with a wrong checksum")
        if move.expert in self._slab.experts():
            return 0
        self._slab.add(move.expert, message[HEAD_BYTES:])
        return self._blob_bytes
