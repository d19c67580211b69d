"""The mover: this rank's part in copying experts between ranks, beside the serving traffic.

A round gives each rank one peer at most. Both ends walk the round's moves in the same order, so each knows whether it
sends or receives next. A blob travels with its checksum and counts only once the receiver has checked it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from placement.errors import MigrationError
from placement.migration import Move
from workers.host_slab import HostSlab, checksum

CHECKSUM_BYTES = 16


class Mover:
    """Copies blobs between host slabs over a process group of its own. One round at a time."""

    def __init__(self, slab: HostSlab, *, group: dist.ProcessGroup, rank: int, blob_bytes: int) -> None:
        self._slab = slab
        self._group = group
        self._rank = rank
        self._blob_bytes = blob_bytes

    def copy_round(self, moves: Sequence[Move]) -> int:
        """Do this rank's moves of a round, in order. Returns the bytes received. Raises MigrationError."""
        received = 0
        for move in moves:
            try:
                if move.source.rank == self._rank:
                    self._send(move)
                elif move.target.rank == self._rank:
                    self._receive(move)
                    received += self._blob_bytes
            except RuntimeError as error:
                raise MigrationError(f"copying {move.expert} to rank {move.target.rank} failed: {error}") from error
        return received

    def _send(self, move: Move) -> None:
        blob = self._slab.blob(move.expert)
        digest = torch.frombuffer(bytearray(checksum(blob)), dtype=torch.uint8)
        dist.send(torch.cat([digest, blob]), move.target.rank, group=self._group)

    def _receive(self, move: Move) -> None:
        row = self._slab.claim(move.expert)
        try:
            message = torch.empty(CHECKSUM_BYTES + self._blob_bytes, dtype=torch.uint8)
            dist.recv(message, move.source.rank, group=self._group)
            row.copy_(message[CHECKSUM_BYTES:])
            if checksum(row) != message[:CHECKSUM_BYTES].numpy().tobytes():
                raise MigrationError(f"{move.expert} arrived from rank {move.source.rank} with a wrong checksum")
        except (RuntimeError, MigrationError):
            self._slab.release(move.expert)
            raise
        self._slab.publish(move.expert)
