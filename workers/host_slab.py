"""The host slab: the blobs of all experts that this rank owns, in one allocation of host memory.

Rows are claimed before they are filled, so that a migration that would not fit is refused before anything is copied.
A blob that came from a peer counts only once it is published, which `publish` does after its checksum agreed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import xxhash

from placement.core import ExpertId
from placement.errors import MigrationError
from workers.links import Arrival
from workers.offers import NOTHING, Offer
from workers.pinning import HostRows, host_memory


class HostSlab:
    """[capacity, blob_bytes] uint8 in host memory, and which expert lies in which row. Safe to use from threads."""

    def __init__(self, *, capacity: int, blob_bytes: int, pin: bool = False, memory: HostRows | None = None) -> None:
        self.memory = host_memory(capacity, blob_bytes, pin=pin) if memory is None else memory
        self._blobs = self.memory.rows
        # Made once: an index into a tensor takes as long as the rest of a lookup.
        self._views = self._blobs.unbind()
        self._free = list(range(capacity - 1, -1, -1))
        self._rows: dict[ExpertId, int] = {}
        self._claimed: dict[ExpertId, int] = {}
        self._held: Counter[ExpertId] = Counter()
        self._put_off: dict[ExpertId, list[Callable[[], None]]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._blobs.numel()

    @property
    def capacity(self) -> int:
        """How many experts fit."""
        return len(self._blobs)

    @property
    def num_rows(self) -> int:
        """How many experts lie in host memory at the same time."""
        return len(self._blobs)

    @property
    def num_free(self) -> int:
        with self._lock:
            return len(self._free)

    def experts(self) -> frozenset[ExpertId]:
        """The experts whose blobs are here and counted."""
        with self._lock:
            return frozenset(self._rows)

    def holds(self, expert: ExpertId) -> bool:
        """Whether an expert's blob is here and counted."""
        with self._lock:
            return expert in self._rows

    def claim(self, expert: ExpertId) -> torch.Tensor:
        """A row to write an expert's blob into, [blob_bytes]. Raises MigrationError when the slab is full."""
        with self._lock:
            assert expert not in self._rows and expert not in self._claimed, expert
            if not self._free:
                raise MigrationError(
                    f"no room for {expert}: the host slab has {len(self._blobs)} rows and {len(self._rows)} experts; "
                    f"raise workers.host_slab_rows"
                )
            row = self._free.pop()
            self._claimed[expert] = row
            return self._views[row]

    def publish(self, expert: ExpertId) -> None:
        """The blob in the claimed row is whole and checked: from now on it counts."""
        with self._lock:
            self._rows[expert] = self._claimed.pop(expert)

    def release(self, expert: ExpertId) -> None:
        """Give back the row of an expert, claimed or published; the blob is gone. Unknown experts are no error."""
        with self._lock:
            row = self._rows.pop(expert, None)
            if row is None:
                row = self._claimed.pop(expert, None)
            if row is not None:
                self._give_back(expert, partial(self._free.append, row))

    def _give_back(self, expert: ExpertId, free: Callable[[], None]) -> None:
        """Now, or once nobody holds the expert. Under the lock."""
        if self._held[expert]:
            self._put_off.setdefault(expert, []).append(free)
        else:
            free()

    def blob(self, expert: ExpertId) -> torch.Tensor:
        """[blob_bytes] of an expert that is here; KeyError otherwise."""
        with self._lock:
            return self._blob(expert)

    def _blob(self, expert: ExpertId) -> torch.Tensor:
        """Under the lock."""
        return self._views[self._rows[expert]]

    @contextmanager
    def holding(self, expert: ExpertId) -> Iterator[torch.Tensor]:
        """The blob of an expert, which stays in its place meanwhile; KeyError for one that is not owned."""
        with self._lock:
            blob = self._blob(expert)
            self._held[expert] += 1
        try:
            yield blob
        finally:
            with self._lock:
                self._held[expert] -= 1
                if not self._held[expert]:
                    del self._held[expert]
                    for free in self._put_off.pop(expert, ()):
                        free()

    def fetch(self, experts: Sequence[ExpertId]) -> list[torch.Tensor | None]:
        """The blobs of experts that are about to be copied to the device; None for one that can't be read."""
        with self._lock:
            return [self._blob(expert) for expert in experts]

    def lent(self, experts: Sequence[ExpertId], arrival: Arrival) -> None:
        """The blobs that were fetched are being read until the arrival is done."""

    def is_ready(self, expert: ExpertId) -> bool:
        """Whether a copy could begin at once."""
        return True

    def promote(self, experts: Sequence[ExpertId]) -> None:
        """See to it that experts are ready soon."""

    def regard(self, tiers: Mapping[ExpertId, int]) -> None:
        """What a placement thinks of the experts (`placement.core.Tier`)."""

    def figures(self) -> dict[str, float]:
        """What there is to say beside the cache's own counters."""
        return {}

    def offer(self, expert: ExpertId) -> Offer:
        """Where another process can find an expert's blob: one that is lent stays there until it is given back."""
        return NOTHING

    def withdraw(self, offer: Offer) -> None:
        """The offer was not taken."""

    def adopt(self, expert: ExpertId, offer: Offer, digest: bytes) -> bool:
        """Own an expert where it lies, if it can be seen from here and has this checksum."""
        return False

    def copy(self, expert: ExpertId, offer: Offer, digest: bytes) -> bool:
        """Own a copy of an expert, read where it lies, if it can be seen from here and has this checksum. Raises
        MigrationError when the slab is full."""
        return False

    def add(self, expert: ExpertId, blob: torch.Tensor) -> None:
        self.claim(expert).copy_(blob)
        self.publish(expert)


def checksum(blob: torch.Tensor) -> bytes:
    """16 bytes that tell one blob from another."""
    return xxhash.xxh3_128_digest(blob.contiguous().numpy().data)
