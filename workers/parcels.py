"""Parcels: experts that travel together between two GPUs, and the buffers that they travel through."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from placement.migration import Move

# What both ends do for a parcel takes as long as 64 MB take on the link: with smaller ones the link would wait.
RING = 4
PARCEL_BYTES, MOST_BLOBS = 128 << 20, 8
# In front of each blob, as much as blobs are aligned to: its checksum as sent, and as it came.
HEAD_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A parcel that both ends agreed on and whose turn comes. most: how many parcels the other end can have begun.

    Of one that is sent: held, its blobs, until they are loaded into its buffer. Of one that comes: rows for it.
    """

    moves: Sequence[Move]
    buffer: int
    most: int
    rows: Sequence[torch.Tensor | None] = ()
    loaded: torch.cuda.Event | None = None
    held: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Moves of one direction on their way in a buffer of the ring. over: when they are there, or gone. rows: where they
    are to be published, None for one that is sent, or known here already."""

    moves: Sequence[Move]
    buffer: int
    over: torch.cuda.Event
    rows: Sequence[torch.Tensor | None]


class ParcelRing:
    """Buffers [RING, n, HEAD_BYTES + blob_bytes] on the GPU, and the streams of a parcel's way."""

    def __init__(self, blob_bytes: int, num_blobs: int, device: torch.device) -> None:
        self.buffers = torch.empty((RING, num_blobs, HEAD_BYTES + blob_bytes), dtype=torch.uint8, device=device)
        self.heads = torch.zeros((RING, num_blobs, 2), dtype=torch.int64).pin_memory()
        # Odd, so that no change of one word goes unseen; another one for each word, so that no two can change places.
        self._factors = torch.arange(blob_bytes // 8, device=device, dtype=torch.int64) * (2 * 0x9E3779B9) + 1
        self._products = torch.empty((num_blobs, blob_bytes // 8), dtype=torch.int64, device=device)
        # Two of them wait for the other end, and are not to share a queue with what serves (see `peers`).
        self.up, self.wire, self.down = (
            torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            for priority in (0, -1, -1)
        )
        with torch.cuda.stream(self.wire):
            for column in range(2):
                self.add_up(0, num_blobs, column)
            self.heads[0].copy_(self.head(0, num_blobs), non_blocking=True)
        torch.cuda.synchronize(device)

    def head(self, buffer: int, count: int) -> torch.Tensor:
        """[count, 2] int64: checksum as sent, checksum as it came."""
        return self.buffers[buffer, :count, :16].view(torch.int64)

    def add_up(self, buffer: int, count: int, column: int) -> None:
        """Write the checksum of each blob into its head. Takes no memory but what was taken when the ring was made."""
        products = self._products[:count]
        torch.mul(self.buffers[buffer, :count, HEAD_BYTES:].view(torch.int64), self._factors, out=products)
        self.head(buffer, count)[:, column] = products.sum(dim=1)


def blobs_in_parcel(blob_bytes: int) -> int:
    """How many experts travel together."""
    return max(1, min(MOST_BLOBS, PARCEL_BYTES // blob_bytes))


def parcels(moves: Sequence[Move], rank: int, most: int) -> list[tuple[Move, ...]]:
    """A rank's moves of a round in parcels of one direction, at most `most` in each; the directions take turns, so that
    both ways of the host link are used. Alike on both ends of a pair."""
    own = [move for move in moves if rank in (move.source.rank, move.target.rank)]
    ways = [[move for move in own if move.source.rank == source] for source in sorted({m.source.rank for m in own})]
    cut = [[tuple(way[start : start + most]) for start in range(0, len(way), most)] for way in ways]
    return [parcel for turn in zip_longest(*cut) for parcel in turn if parcel is not None]
