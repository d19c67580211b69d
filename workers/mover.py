"""The mover: this rank's part in copying experts between ranks, beside the serving traffic.

A round gives each rank one peer at most. Both ends walk the round's moves in the same order, and those that follow each
other in one direction go as one run. First come its heads: an epoch, a checksum, and where the blob lies, for
each. The receiver answers for each: it takes the blob where it lies, or copies it from there, if both are on one
machine; else it has it sent. It counts only where the receiver waits for that very epoch and has checked the blob.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
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
# Each message wakes threads at both ends, which take the interpreter from those that serve. The blobs of a run stay in
# their places until it is over, for which the smallest slab must have the rows.
MOST_IN_A_RUN = 8
# One thread copies and adds up a fraction of what memory can give; more than a cap needs would only disturb, and where
# there are few cores, serving needs them.
MOST_COPIERS, CORES_A_COPIER, COPIER_BYTES_PER_S = 4, 4, 2e9


class Answer(IntEnum):
    """What the receiver says to a head: it has it already, has taken it where it lies, has copied it from there, wants
    it sent, wants it not."""

    REFUSED = 0
    HAVE = 1
    TAKEN = 2
    SEND = 3
    COPIED = 4


class Pace:
    """No more than max_bytes_per_s; None is no limit. Blobs that belong together, up to `together` of them, may go at
    once: what was not used of the time before them counts for them."""

    def __init__(self, blob_bytes: int, max_bytes_per_s: float | None, *, together: int = 1) -> None:
        self._pause_s = 0.0 if max_bytes_per_s is None else blob_bytes / max_bytes_per_s
        self._unused_s = (together - 1) * self._pause_s
        self._next_send = 0.0

    def keep(self) -> None:
        """Wait until the next blob may be sent; or, after it was, until one may have been."""
        time.sleep(self.wait_s(time.monotonic()))

    def wait_s(self, now: float) -> float:
        """How long to wait for the next blob."""
        due = max(now - self._unused_s, self._next_send)
        self._next_send = due + self._pause_s
        return max(0.0, due - now)


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
        self._pace = Pace(blob_bytes, max_bytes_per_s, together=MOST_IN_A_RUN)
        self._copiers = num_copiers(max_bytes_per_s)

    def copy_round(self, epoch: int, moves: Sequence[Move]) -> int:
        """Do this rank's moves of a round to an epoch, in order. Returns the bytes received.

        Raises MigrationError, and StaleEpochError where a peer moves to another epoch.
        """
        received = 0
        with ThreadPoolExecutor(self._copiers, thread_name_prefix="expert-copy") as copiers:
            for run in runs(moves, self._rank):
                source, target = run[0].source.rank, run[0].target.rank
                try:
                    if source == self._rank:
                        self._send(epoch, run, copiers)
                    else:
                        received += self._receive(epoch, run, copiers)
                except ExchangeError as error:
                    raise MigrationError(f"copying {_named(run)} to rank {target} failed: {error}") from error
        return received

    def _send(self, epoch: int, run: Sequence[Move], copiers: Executor) -> None:
        target = run[0].target.rank
        with ExitStack() as held:
            blobs = [self._hold(move, len(run), held) for move in run]
            offers = [self._slab.offer(move.expert) for move in run]
            heads = [
                epoch.to_bytes(EPOCH_BYTES, "big") + digest + offer.pack()
                for digest, offer in zip(copiers.map(checksum, blobs), offers, strict=True)
            ]
            self._group.send(torch.frombuffer(bytearray(b"".join(heads)), dtype=torch.uint8), target)
            said = torch.zeros(len(run), dtype=torch.uint8)
            self._group.receive(said, target)
            answers = [Answer(answer) for answer in said.tolist()]
            for offer, answer in zip(offers, answers, strict=True):
                if answer is not Answer.TAKEN:
                    self._slab.withdraw(offer)
            if Answer.REFUSED in answers:
                raise MigrationError(f"rank {target} does not take {_named(run)} for epoch {epoch}")
            for blob, answer in zip(blobs, answers, strict=True):
                if answer in (Answer.SEND, Answer.COPIED):
                    self._pace.keep()
                if answer is Answer.SEND:
                    self._group.send(blob, target)

    def _hold(self, move: Move, num_heads: int, held: ExitStack) -> torch.Tensor:
        try:
            return held.enter_context(self._slab.holding(move.expert))
        except (KeyError, DiskError) as error:
            head = NOTHING_COMES.to_bytes(EPOCH_BYTES, "big").ljust(HEAD_BYTES, b"\0")
            self._group.send(torch.frombuffer(bytearray(head * num_heads), dtype=torch.uint8), move.target.rank)
            raise MigrationError(f"rank {self._rank} has no copy of {move.expert} to send: {error}") from error

    def _receive(self, epoch: int, run: Sequence[Move], copiers: Executor) -> int:
        """The bytes that came: none where experts are here already, as they may be after a move that was broken off."""
        source = run[0].source.rank
        message = torch.empty(len(run) * HEAD_BYTES, dtype=torch.uint8)
        self._group.receive(message, source)
        heads = [bytes(head) for head in message.view(len(run), HEAD_BYTES).numpy()]
        for head in heads:
            theirs = int.from_bytes(head[:EPOCH_BYTES], "big")
            if theirs == NOTHING_COMES:
                raise MigrationError(f"rank {source} has no copy of {_named(run)} to send")
            if theirs != epoch:
                self._group.send(torch.full((len(run),), Answer.REFUSED, dtype=torch.uint8), source)
                raise StaleEpochError(
                    f"rank {self._rank} moves to epoch {epoch}, but rank {source} sends for epoch {theirs}"
                )
        answers: list[Answer] = []
        refusal: MigrationError | None = None
        for pending in [copiers.submit(self._answer, move, head) for move, head in zip(run, heads, strict=True)]:
            try:
                answers.append(pending.result())
            except MigrationError as error:
                answers.append(Answer.REFUSED)
                refusal = error
        self._group.send(torch.tensor(answers, dtype=torch.uint8), source)
        if refusal is not None:
            raise refusal
        wanted = [
            (move.expert, head[EPOCH_BYTES:OFFER_AT])
            for move, head, answer in zip(run, heads, answers, strict=True)
            if answer is Answer.SEND
        ]
        for expert, digest in wanted:
            blob = torch.empty(self._blob_bytes, dtype=torch.uint8)
            self._group.receive(blob, source)
            if checksum(blob) != digest:
                raise MigrationError(f"{expert} arrived from rank {source} with a wrong checksum")
            self._slab.add(expert, blob)
        return (len(wanted) + answers.count(Answer.COPIED)) * self._blob_bytes

    def _answer(self, move: Move, head: bytes) -> Answer:
        """Own the expert where it lies, or a copy from there, if that can be. Raises MigrationError without room."""
        offer, digest = Offer.unpack(head[OFFER_AT:]), head[EPOCH_BYTES:OFFER_AT]
        if self._slab.holds(move.expert):
            return Answer.HAVE
        if self._slab.adopt(move.expert, offer, digest):
            return Answer.TAKEN
        return Answer.COPIED if self._slab.copy(move.expert, offer, digest) else Answer.SEND


def runs(moves: Sequence[Move], rank: int) -> Iterator[tuple[Move, ...]]:
    """Of a rank's moves, those that follow each other in one direction; both ends find the same."""
    mine = [move for move in moves if rank in (move.source.rank, move.target.rank)]
    for _, way in itertools.groupby(mine, lambda move: (move.source.rank, move.target.rank)):
        left = tuple(way)
        for start in range(0, len(left), MOST_IN_A_RUN):
            yield left[start : start + MOST_IN_A_RUN]


def num_copiers(max_bytes_per_s: float | None) -> int:
    """Threads of a round on this machine."""
    most = min(MOST_COPIERS, len(os.sched_getaffinity(0)) // CORES_A_COPIER)
    if max_bytes_per_s is not None:
        most = min(most, math.ceil(max_bytes_per_s / COPIER_BYTES_PER_S))
    return max(1, most)


def _named(run: Sequence[Move]) -> str:
    return f"{run[0].expert}" if len(run) == 1 else f"one of {len(run)} experts from {run[0].expert} on"
