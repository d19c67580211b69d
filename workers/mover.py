"""The mover: this rank's part in copying experts between ranks, beside the serving traffic.

A round gives each rank one peer at most. Both ends walk the round's moves in the same order, so each knows whether it
sends or receives next. First comes a head: an epoch, a checksum, and where the blob lies. The receiver answers: it
takes the blob where it lies, if both are on one machine, or has it sent. It counts only where the receiver waits for
that very epoch and has checked the blob.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum

import torch

from placement.errors import DiskError, ExchangeError, MigrationError, StaleEpochError
from placement.migration import Move
from workers.group import Group
from workers.host_slab import HostSlab, checksum
from workers.offers import Offer

EPOCH_BYTES, CHECKSUM_BYTES = 8, 16
OFFER_AT = EPOCH_BYTES + CHECKSUM_BYTES
HEAD_BYTES = OFFER_AT + Offer.NUM_BYTES
# Said in place of an epoch by who can't send, so that the other end need not wait.
NOTHING_COMES = (1 << 64) - 1


class Answer(IntEnum):
    """What the receiver says to a head: it has it already, has taken it where it lies, wants it sent, wants it not."""

    REFUSED = 0
    HAVE = 1
    TAKEN = 2
    SEND = 3


class Pace:
    """Waits so long before each blob that no more than max_bytes_per_s are sent; None is no limit."""

    def __init__(self, blob_bytes: int, max_bytes_per_s: float | None) -> None:
        self._pause_s = 0.0 if max_bytes_per_s is None else blob_bytes / max_bytes_per_s
        self._next_send = 0.0

    def keep(self) -> None:
        now = time.monotonic()
        if self._next_send > now:
            time.sleep(self._next_send - now)
        self._next_send = max(now, self._next_send) + self._pause_s


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
        self._pace = Pace(blob_bytes, max_bytes_per_s)

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
        try:
            with self._slab.holding(move.expert) as blob:
                self._hand_over(epoch, move, blob)
        except (KeyError, DiskError) as error:
            head = NOTHING_COMES.to_bytes(EPOCH_BYTES, "big").ljust(HEAD_BYTES, b"\0")
            self._group.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), move.target.rank)
            raise MigrationError(f"rank {self._rank} has no copy of {move.expert} to send: {error}") from error

    def _hand_over(self, epoch: int, move: Move, blob: torch.Tensor) -> None:
        offer = self._slab.offer(move.expert)
        head = epoch.to_bytes(EPOCH_BYTES, "big") + checksum(blob) + offer.pack()
        self._group.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), move.target.rank)
        said = torch.zeros(1, dtype=torch.uint8)
        self._group.receive(said, move.target.rank)
        answer = Answer(int(said))
        if answer is not Answer.TAKEN:
            self._slab.withdraw(offer)
        if answer is Answer.REFUSED:
            raise MigrationError(f"rank {move.target.rank} does not move to epoch {epoch}")
        if answer is Answer.SEND:
            self._pace.keep()
            self._group.send(blob, move.target.rank)

    def _receive(self, epoch: int, move: Move) -> int:
        """The bytes that came: none where the expert is here already, as it may be after a move that was broken off."""
        message = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._group.receive(message, move.source.rank)
        head = message.numpy().tobytes()
        theirs, digest = int.from_bytes(head[:EPOCH_BYTES], "big"), head[EPOCH_BYTES:OFFER_AT]
        if theirs == NOTHING_COMES:
            raise MigrationError(f"rank {move.source.rank} has no copy of {move.expert} to send")
        if theirs != epoch:
            self._answer(Answer.REFUSED, move)
            raise StaleEpochError(
                f"rank {self._rank} moves to epoch {epoch}, but rank {move.source.rank} sends for epoch {theirs}"
            )
        if self._slab.holds(move.expert):
            self._answer(Answer.HAVE, move)
            return 0
        if self._slab.adopt(move.expert, Offer.unpack(head[OFFER_AT:]), digest):
            self._answer(Answer.TAKEN, move)
            return 0
        self._answer(Answer.SEND, move)
        blob = torch.empty(self._blob_bytes, dtype=torch.uint8)
        self._group.receive(blob, move.source.rank)
        if checksum(blob) != digest:
            raise MigrationError(f"{move.expert} arrived from rank {move.source.rank} with a wrong checksum")
        self._slab.add(move.expert, blob)
        return self._blob_bytes

    def _answer(self, answer: Answer, move: Move) -> None:
        self._group.send(torch.tensor([answer], dtype=torch.uint8), move.source.rank)
