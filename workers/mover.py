"""The mover: this rank's part in copying experts between ranks, beside the serving traffic.

A round gives each rank one peer at most. Both ends walk the round's moves in the same order, and those that follow each
other in one direction go as one run. First come its heads: for each expert its epoch, its checksum, and where the blob
lies. The receiver answers for each: it takes the blob where it lies, or copies it from there, if both are on one
machine; else it makes room and has it sent. It counts only where the receiver waits for that very expert and epoch and
has checked the blob. What was agreed is sent and taken to the end, so that the next run begins with its own heads.
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

from placement.core import ExpertId
from placement.errors import DiskError, ExchangeError, MigrationError, StaleEpochError
from placement.migration import Move
from workers.group import Group
from workers.heads import MOST_IN_A_RUN, NOTHING_COMES, Head, no_heads, pack_heads, unpack_heads
from workers.host_slab import HostSlab, checksum

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
        spoiled: list[Move] = []
        with ThreadPoolExecutor(self._copiers, thread_name_prefix="expert-copy") as copiers:
            for run in runs(moves, self._rank):
                source, target = run[0].source.rank, run[0].target.rank
                try:
                    if source == self._rank:
                        self._send(epoch, run, copiers)
                    else:
                        received += self._receive(epoch, run, copiers, spoiled)
                except ExchangeError as error:
                    raise MigrationError(f"copying {_named(run)} to rank {target} failed: {error}") from error
        if spoiled:
            # Its sender does not know: the round went on as both ends expected.
            raise wrong_checksum(spoiled[0])
        return received

    def _send(self, epoch: int, run: Sequence[Move], copiers: Executor) -> None:
        target = run[0].target.rank
        with ExitStack() as held:
            blobs = [self._hold(move, held) for move in run]
            offers = [self._slab.offer(move.expert) for move in run]
            heads = [
                Head(epoch=epoch, expert=move.expert, digest=digest, offer=offer)
                for move, digest, offer in zip(run, copiers.map(checksum, blobs), offers, strict=True)
            ]
            self._group.send(pack_heads(heads), target)
            said = torch.zeros(MOST_IN_A_RUN, dtype=torch.uint8)
            self._group.receive(said, target)
            answers = [Answer(answer) for answer in said[: len(run)].tolist()]
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

    def _hold(self, move: Move, held: ExitStack) -> torch.Tensor:
        try:
            return held.enter_context(self._slab.holding(move.expert))
        except (KeyError, DiskError) as error:
            self._group.send(pack_heads([Head(epoch=NOTHING_COMES, expert=move.expert)]), move.target.rank)
            raise MigrationError(f"rank {self._rank} has no copy of {move.expert} to send: {error}") from error

    def _receive(self, epoch: int, run: Sequence[Move], copiers: Executor, spoiled: list[Move]) -> int:
        """The bytes that came: none where experts are here already, as they may be after a move that was broken off.
        What comes with a wrong checksum goes to `spoiled`."""
        source = run[0].source.rank
        heads = self._heads(epoch, run)
        answers: list[Answer] = []
        rows: dict[ExpertId, torch.Tensor] = {}
        refusal: MigrationError | None = None
        try:
            for head, pending in [(head, copiers.submit(self._answer, head)) for head in heads]:
                try:
                    answer = pending.result()
                    if answer is Answer.SEND:
                        rows[head.expert] = self._slab.claim(head.expert)
                except MigrationError as error:
                    answer, refusal = Answer.REFUSED, error
                answers.append(answer)
            self._say(answers, source)
            if refusal is not None:
                raise refusal
            self._take([head for head in heads if head.expert in rows], rows, source)
            spoiled += [move for move in run if move.expert in rows]
            received = answers.count(Answer.SEND) + answers.count(Answer.COPIED) - len(rows)
        finally:
            for expert in rows:
                self._slab.release(expert)
        return received * self._blob_bytes

    def _heads(self, epoch: int, run: Sequence[Move]) -> list[Head]:
        """The heads of a run, if it is the one that this rank waits for."""
        source = run[0].source.rank
        message = no_heads()
        self._group.receive(message, source)
        heads = unpack_heads(message, len(run))
        if heads[0].epoch == NOTHING_COMES:
            raise MigrationError(f"rank {source} has no copy of {_named(run)} to send")
        for head, move in zip(heads, run, strict=True):
            if (head.epoch, head.expert) == (epoch, move.expert):
                continue
            self._say([Answer.REFUSED] * len(run), source)
            if head.epoch != epoch:
                raise StaleEpochError(
                    f"rank {self._rank} moves to epoch {epoch}, but rank {source} sends for epoch {head.epoch}"
                )
            raise MigrationError(f"rank {self._rank} waits for {move.expert}, but rank {source} sends {head.expert}")
        return heads

    def _say(self, answers: Sequence[Answer], source: int) -> None:
        said = torch.zeros(MOST_IN_A_RUN, dtype=torch.uint8)
        said[: len(answers)] = torch.tensor(answers, dtype=torch.uint8)
        self._group.send(said, source)

    def _take(self, heads: Sequence[Head], rows: dict[ExpertId, torch.Tensor], source: int) -> None:
        """Take what is sent, and publish what is right, of which the rows are given up."""
        for head in heads:
            # Not into its row: where this rank leaves, bytes may still come when the row is another expert's.
            blob = torch.empty(self._blob_bytes, dtype=torch.uint8)
            self._group.receive(blob, source)
            if checksum(blob) == head.digest:
                rows[head.expert].copy_(blob)
                self._slab.publish(head.expert)
                del rows[head.expert]

    def _answer(self, head: Head) -> Answer:
        """Own the expert where it lies, or a copy from there, if that can be. Raises MigrationError without room."""
        if self._slab.holds(head.expert):
            return Answer.HAVE
        if self._slab.adopt(head.expert, head.offer, head.digest):
            return Answer.TAKEN
        return Answer.COPIED if self._slab.copy(head.expert, head.offer, head.digest) else Answer.SEND


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
        most = math.ceil(min(most, max_bytes_per_s / COPIER_BYTES_PER_S))
    return max(1, most)


def wrong_checksum(move: Move) -> MigrationError:
    """What a round says of a blob that was spoiled on its way."""
    return MigrationError(f"{move.expert} arrived from rank {move.source.rank} with a wrong checksum")


def _named(run: Sequence[Move]) -> str:
    return f"{run[0].expert}" if len(run) == 1 else f"one of {len(run)} experts from {run[0].expert} on"
