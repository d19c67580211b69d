"""A host slab that the ranks of one machine share: an expert changes its owner without a copy, or by one.

Each rank's rows lie in a file in memory (`memfd`). It has no name, so that nothing is left to unlink however a process
ends, and it is not counted against `/dev/shm`, which is small in containers. A rank that is to hand an expert on
*offers* the row; the other opens the file through `/proc`, checks the row against the sender's checksum, and *adopts*
it.
A row that is lent is not used again until it is given back; who has it is written behind the rows, in the same file.
What was adopted stays readable when the lender dies. Rows that are not lent can be copied from there, which needs no
process group. So it is always where memory is registered with CUDA: what is adopted would have to be registered anew,
which stops a GPU. Ranks that do not see each other (other machines, containers or users) are sent what they need.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import torch

from placement.core import ExpertId
from workers.host_slab import HostSlab, checksum
from workers.machine import machine_id
from workers.offers import NOTHING, Offer
from workers.pinning import Mapping, prepare

logger = logging.getLogger(__name__)
# Rows that are lent are missed where they lie: at most one in so many, so that migrations still find room.
LENT_ONE_IN = 8
FREE, OFFERED = 0, -1
# Who takes an offer does so at once; one that nobody has taken by then was lost on the way.
OFFER_STANDS_S = 300.0


class SharedSlab(HostSlab):
    """capacity rows of one's own, and adopted experts in rows of others. Safe to use from threads."""

    def __init__(self, *, capacity: int, blob_bytes: int, pin: bool = False) -> None:
        self._file = os.memfd_create("moetis-experts")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, _file_bytes(capacity, blob_bytes))
        mine = _Rows(self._file, capacity, blob_bytes, pin=pin)
        super().__init__(capacity=capacity, blob_bytes=blob_bytes, memory=mine.memory)
        self._borrowers = mine.borrowers
        self._blob_bytes = blob_bytes
        self._pin = pin
        self._others: dict[tuple[int, int], _Rows] = {}
        self._adopted: dict[ExpertId, tuple[_Rows, int]] = {}
        self._adopting: set[ExpertId] = set()
        self._lent: set[int] = set()
        self._offered_at: dict[int, float] = {}
        self._machine = machine_id()

    @property
    def capacity(self) -> int:
        with self._lock:
            self._take_back()
            return len(self._blobs) - len(self._lent)

    @property
    def num_free(self) -> int:
        with self._lock:
            self._take_back()
            return len(self._free)

    def experts(self) -> frozenset[ExpertId]:
        with self._lock:
            return frozenset(self._rows) | frozenset(self._adopted)

    def holds(self, expert: ExpertId) -> bool:
        with self._lock:
            return expert in self._rows or expert in self._adopted

    def _blob(self, expert: ExpertId) -> torch.Tensor:
        if self._adopted and expert in self._adopted:
            rows, row = self._adopted[expert]
            return rows.blobs[row]
        return super()._blob(expert)

    def claim(self, expert: ExpertId) -> torch.Tensor:
        assert expert not in self._adopted, expert
        with self._lock:
            if not self._free:
                self._take_back()
        return super().claim(expert)

    def release(self, expert: ExpertId) -> None:
        with self._lock:
            adopted = self._adopted.pop(expert, None)
            if adopted is not None:
                self._give_back(expert, partial(adopted[0].borrowers.__setitem__, adopted[1], FREE))
            row = self._rows.pop(expert, self._claimed.pop(expert, None))
            if row is not None:
                self._give_back(expert, partial(self._free_or_lend, row))

    def _free_or_lend(self, row: int) -> None:
        if self._borrowers[row] != FREE:
            self._lent.add(row)
        else:
            self._free.append(row)

    # ------------------------------------------------------------------------------------------------------- sharing

    def offer(self, expert: ExpertId) -> Offer:
        with self._lock:
            row = self._rows.get(expert)
            if row is None:
                return NOTHING
            if self._is_lost(row):
                self._borrowers[row] = FREE
            has_room = np.count_nonzero(self._borrowers) < len(self._blobs) // LENT_ONE_IN
            lends = bool(self._borrowers[row] == FREE and has_room and not self._pin)
            if lends:
                self._borrowers[row] = OFFERED
                self._offered_at[row] = time.monotonic()
        return Offer(
            machine=self._machine, process=os.getpid(), file=self._file, rows=len(self._blobs), row=row, lends=lends
        )

    def withdraw(self, offer: Offer) -> None:
        with self._lock:
            if offer.lends and self._borrowers[offer.row] == OFFERED:
                self._borrowers[offer.row] = FREE

    def adopt(self, expert: ExpertId, offer: Offer, digest: bytes) -> bool:
        rows = self._rows_of(offer) if offer.lends and not self._pin else None
        if rows is None or not self._reserve(expert):
            return False
        # It is said before it is checked: once this stands there, the row is not used for anything else.
        rows.borrowers[offer.row] = os.getpid()
        agrees = checksum(rows.blobs[offer.row]) == digest
        with self._lock:
            self._adopting.remove(expert)
            if agrees:
                self._adopted[expert] = (rows, offer.row)
            else:
                rows.borrowers[offer.row] = FREE
        return agrees

    def copy(self, expert: ExpertId, offer: Offer, digest: bytes) -> bool:
        rows = self._rows_of(offer)
        if rows is None:
            return False
        here = self.claim(expert)
        here.copy_(rows.blobs[offer.row])
        if checksum(here) != digest:
            self.release(expert)
            return False
        self.publish(expert)
        return True

    def _reserve(self, expert: ExpertId) -> bool:
        """Whether there is room to adopt an expert, beside those that other threads adopt."""
        with self._lock:
            assert expert not in self._rows and expert not in self._adopted, expert
            owned = len(self._rows) + len(self._claimed) + len(self._adopted) + len(self._adopting)
            if owned < len(self._blobs):
                self._adopting.add(expert)
            return expert in self._adopting

    def figures(self) -> dict[str, float]:
        with self._lock:
            return {"experts_adopted": len(self._adopted), "rows_lent": int(np.count_nonzero(self._borrowers))}

    def _rows_of(self, offer: Offer) -> _Rows | None:
        """The rows of another process; None where they can't be seen from here."""
        key = (offer.process, offer.file)
        if offer.machine != self._machine:
            return None
        with self._lock:
            if key not in self._others:
                try:
                    self._others[key] = self._map(offer)
                except (OSError, ValueError) as error:
                    logger.info("experts of process %d are sent: its memory can't be mapped: %s", offer.process, error)
                    return None
            return self._others[key]

    def _is_lost(self, row: int) -> bool:
        """Whether a row was offered so long ago that nobody takes it any more. Under the lock."""
        return bool(self._borrowers[row] == OFFERED and time.monotonic() - self._offered_at[row] > OFFER_STANDS_S)

    def _map(self, offer: Offer) -> _Rows:
        file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR)
        try:
            if os.fstat(file).st_size != _file_bytes(offer.rows, self._blob_bytes):
                raise ValueError("it is not of the size that was said")
            return _Rows(file, offer.rows, self._blob_bytes, pin=False, touch=False)
        finally:
            os.close(file)

    def _take_back(self) -> None:
        """Free the rows that were given back, or whose borrower is dead. Under the lock."""
        for row in list(self._lent):
            borrower = int(self._borrowers[row])
            is_dead = borrower not in (FREE, OFFERED) and not Path(f"/proc/{borrower}").exists()
            if borrower == FREE or is_dead or self._is_lost(row):
                self._borrowers[row] = FREE
                self._lent.discard(row)
                self._free.append(row)


class _Rows:
    """The rows of one file, mapped here: blobs [rows, blob_bytes], and the process that has borrowed each, or 0."""

    def __init__(self, file: int, rows: int, blob_bytes: int, *, pin: bool, touch: bool = True) -> None:
        mapping = Mapping(file, _file_bytes(rows, blob_bytes))
        self.memory = prepare(mapping, rows, blob_bytes, pin=pin, touch=touch)
        self.blobs = self.memory.rows
        self.borrowers = np.frombuffer(mapping, np.int64, rows, _file_bytes(rows, blob_bytes) - _table_bytes(rows))


def shared_slab(*, capacity: int, blob_bytes: int, pin: bool) -> HostSlab:
    """One that this machine's ranks share; a private one, with a message, where the system has no such memory."""
    try:
        return SharedSlab(capacity=capacity, blob_bytes=blob_bytes, pin=pin)
    except (OSError, AttributeError) as error:
        logger.warning("experts lie in private memory, and move by copies between the ranks of a machine: %s", error)
        return HostSlab(capacity=capacity, blob_bytes=blob_bytes, pin=pin)


def _table_bytes(rows: int) -> int:
    return max(1, -(-8 * rows // mmap.PAGESIZE)) * mmap.PAGESIZE


def _file_bytes(rows: int, blob_bytes: int) -> int:
    return -(-rows * blob_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + _table_bytes(rows)
