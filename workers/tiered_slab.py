"""A host slab for more experts than host memory holds: the coldest stay on disk, and come when they are needed.

Every expert of the rank is *here* (in a row) or *away* (on disk); both count. One that is needed takes the row of the
expert that was needed least, lately and often; what lies in GPU slots is not asked for here, so that memory holds what
the slots do not. Weights are read-only: a demotion writes nothing but what is not on disk yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict

import torch

from placement.core import ExpertId
from placement.errors import DiskError, MigrationError
from workers.disk_tier import DiskTier
from workers.host_slab import HostSlab
from workers.links import Arrival, is_settled_well

logger = logging.getLogger(__name__)
READERS = 8
# Below, those that one group of copies holds could wait for rows that nobody gives back.
LEAST_ROWS = 24
# Uses that a placement's tier counts for: hot, warm, cold, disk.
TIER_WORTH = (4.0, 2.0, 1.0, 0.0)
# A use weighs half as much after so many uses for each row.
HALF_LIFE_ROWS = 2.0


class TieredSlab(HostSlab):
    """rows: experts that fit into memory; capacity: experts that the rank may own at all. Safe to use from threads."""

    def __init__(self, *, rows: int, capacity: int, blob_bytes: int, disk: DiskTier, pin: bool = False) -> None:
        super().__init__(capacity=rows, blob_bytes=blob_bytes, pin=pin)
        self._own_capacity = capacity
        self._disk = disk
        self._away: set[ExpertId] = set()
        self._loading: set[ExpertId] = set()
        self._held: Counter[ExpertId] = Counter()
        self._reader_of_row: dict[int, Arrival] = {}
        self._worth: dict[ExpertId, tuple[float, int]] = {}
        self._uses = 0
        self._changed = threading.Condition(self._lock)
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="disk")

    @property
    def capacity(self) -> int:
        return self._own_capacity

    @property
    def num_free(self) -> int:
        with self._lock:
            return self._own_capacity - len(self._rows) - len(self._claimed) - len(self._away)

    def figures(self) -> dict[str, float]:
        with self._lock:
            return asdict(self._disk.counters) | {"experts_on_disk": len(self._away)}

    def experts(self) -> frozenset[ExpertId]:
        with self._lock:
            return frozenset(self._rows) | self._away

    def holds(self, expert: ExpertId) -> bool:
        with self._lock:
            return expert in self._rows or expert in self._away

    def is_ready(self, expert: ExpertId) -> bool:
        with self._lock:
            return expert in self._rows

    # ------------------------------------------------------------------------------------------------ owning experts

    def add_away(self, expert: ExpertId) -> None:
        """Own an expert that is on disk and stays there until it is needed."""
        with self._lock:
            self._away.add(expert)

    def regard(self, tiers: Mapping[ExpertId, int]) -> None:
        with self._lock:
            for expert, tier in tiers.items():
                self._worth[expert] = (self._worth_now(expert) + TIER_WORTH[tier], self._uses)

    def claim(self, expert: ExpertId) -> torch.Tensor:
        with self._changed:
            assert expert not in self._rows and expert not in self._claimed and expert not in self._away, expert
            if len(self._rows) + len(self._claimed) + len(self._away) >= self._own_capacity:
                raise MigrationError(
                    f"no room for {expert}: this rank may own {self._own_capacity} experts, in memory and on disk; "
                    f"raise workers.host_slab_rows"
                )
            try:
                row = self._take_row()
            except DiskError as error:
                raise MigrationError(f"no room for {expert} in host memory: {error}") from error
            self._claimed[expert] = row
            return self._views[row]

    def publish(self, expert: ExpertId) -> None:
        with self._changed:
            self._rows[expert] = self._claimed.pop(expert)
            self._touch(expert)

    def release(self, expert: ExpertId) -> None:
        with self._changed:
            self._changed.wait_for(lambda: expert not in self._loading and expert not in self._held)
            self._away.discard(expert)
            self._worth.pop(expert, None)
            row = self._rows.pop(expert, self._claimed.pop(expert, None))
            if row is not None:
                self._free.append(row)
                self._changed.notify_all()

    # ----------------------------------------------------------------------------------------------- reading experts

    def blob(self, expert: ExpertId) -> torch.Tensor:
        """[blob_bytes], read from disk if need be; good until another expert takes its row. KeyError for an expert
        that is not owned, DiskError for one that can't be read."""
        with self.holding(expert) as blob:
            return blob

    @contextmanager
    def holding(self, expert: ExpertId) -> Iterator[torch.Tensor]:
        row = self._bring(expert)
        try:
            yield self._views[row]
        finally:
            with self._changed:
                self._let_go(expert)

    def fetch(self, experts: Sequence[ExpertId]) -> list[torch.Tensor | None]:
        """All at once; held until they are `lent`. None, and a warning, for one that can't be read."""
        begun = time.perf_counter()
        absent = [expert for expert in experts if not self.is_ready(expert)]
        # Those that are here first, so that those that come do not take their rows.
        rows: dict[ExpertId, int | None] = {expert: self._try(expert) for expert in experts if expert not in absent}
        rows |= dict(zip(absent, self._pool.map(self._try, absent), strict=True))
        if absent:
            self._disk.stalled(begun)
        return [None if row is None else self._views[row] for row in (rows[expert] for expert in experts)]

    def lent(self, experts: Sequence[ExpertId], arrival: Arrival) -> None:
        with self._changed:
            for expert in experts:
                self._reader_of_row[self._rows[expert]] = arrival
                self._let_go(expert)

    def promote(self, experts: Sequence[ExpertId]) -> None:
        """Have experts read into memory beside the computing."""
        for expert in experts:
            self._pool.submit(self._promote, expert)

    def _promote(self, expert: ExpertId) -> None:
        try:
            if self._try(expert) is not None:
                with self._changed:
                    self._let_go(expert)
        except KeyError:
            # It was released in the meantime.
            return

    def _try(self, expert: ExpertId) -> int | None:
        try:
            return self._bring(expert)
        except DiskError as error:
            logger.warning("expert cannot be served: %s", error)
            return None

    def _bring(self, expert: ExpertId) -> int:
        """The row of an expert, read from disk if need be. It is held."""
        with self._changed:
            self._changed.wait_for(lambda: expert not in self._loading)
            if expert not in self._rows and expert not in self._away:
                raise KeyError(expert)
            self._touch(expert)
            if expert in self._rows:
                self._held[expert] += 1
                return self._rows[expert]
            row = self._take_row()
            self._loading.add(expert)
        try:
            self._disk.read(expert, self._views[row])
        except DiskError:
            with self._changed:
                self._free.append(row)
                self._changed.notify_all()
            raise
        else:
            with self._changed:
                self._away.discard(expert)
                self._rows[expert] = row
                self._held[expert] += 1
            return row
        finally:
            with self._changed:
                self._loading.discard(expert)
                self._changed.notify_all()

    # --------------------------------------------------------------------------------------------------- making room

    def _take_row(self) -> int:
        """A free row, someone's if need be. Under the lock, which is let go of while all rows are in use.

        Raises DiskError where who should make room can't be written to disk.
        """
        while not self._free:
            idle = [expert for expert in self._rows if not self._held[expert]]
            if idle:
                self._demote(min(idle, key=self._worth_now))
            else:
                self._changed.wait()
        row = self._free.pop()
        reader = self._reader_of_row.pop(row, None)
        if reader is not None:
            is_settled_well(reader)
        return row

    def _demote(self, expert: ExpertId) -> None:
        row = self._rows[expert]
        self._disk.keep(expert, self._views[row])
        del self._rows[expert]
        self._away.add(expert)
        self._free.append(row)
        self._disk.counters.demotions += 1

    def _let_go(self, expert: ExpertId) -> None:
        self._held[expert] -= 1
        if not self._held[expert]:
            del self._held[expert]
        self._changed.notify_all()

    def _touch(self, expert: ExpertId) -> None:
        self._uses += 1
        self._worth[expert] = (1.0 + self._worth_now(expert), self._uses)

    def _worth_now(self, expert: ExpertId) -> float:
        worth, at = self._worth.get(expert, (0.0, self._uses))
        return float(worth * 0.5 ** ((self._uses - at) / (HALF_LIFE_ROWS * len(self._blobs))))
