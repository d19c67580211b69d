"""Epochs: how a rank comes from one placement to the next without ever serving between two.

prepare (everything is here) -> commit (ready from now on) -> the ranks vote before each step, and switch together at
the first step boundary where all are ready -> drop (what the old epoch alone needed). Until the switch, abort undoes
all of it. A call for an epoch that is past raises StaleEpochError.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import ExpertId, Placement
from placement.errors import MigrationError, StaleEpochError
from workers.filling import tiers_on
from workers.host_slab import HostSlab
from workers.routing import RoutingTable
from workers.slot_cache import SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """An epoch to come, and all that its first step needs to know: who holds what, and what leaves the slots."""

    placement: Placement
    holds: NDArray[np.uint16]
    leaving: frozenset[ExpertId]

    @property
    def epoch(self) -> int:
        return self.placement.epoch


class EpochKeeper:
    """One rank's epochs. vote and enter run on the serving thread, the rest on any."""

    def __init__(self, *, table: RoutingTable, slab: HostSlab, cache: SlotCache, timeout_s: float) -> None:
        self._table = table
        self._slab = slab
        self._cache = cache
        self._timeout_s = timeout_s
        self._prepared: _Prepared | None = None
        self._ready: _Prepared | None = None
        self._voted: _Prepared | None = None
        self._closed = False
        self._changed = threading.Condition()

    def close(self) -> None:
        """The ranks part: no vote is counted any more, and whoever waits for one is told so."""
        with self._changed:
            self._closed = True
            self._ready = self._prepared = None
            self._changed.notify_all()

    def check_ahead(self, epoch: int) -> None:
        """Raises StaleEpochError unless the epoch lies ahead of the one served."""
        if epoch <= self._table.epoch:
            raise StaleEpochError(
                f"rank {self._table.rank} serves epoch {self._table.epoch}; epoch {epoch} is not ahead of it"
            )

    def prepare(self, target: Placement) -> None:
        """Check that every expert that the target gives this rank is here. Raises MigrationError where one is not."""
        rank, served = self._table.rank, self._table.placement
        mine = target.experts_on(rank)
        # Worked out here, so that the step at whose boundary the epochs change does not wait for it.
        prepared = _Prepared(
            placement=target, holds=target.weights_per_rank(), leaving=frozenset(served.experts_on(rank) - mine)
        )
        with self._changed:
            self.check_ahead(target.epoch)
            if self._table.placement is not served:
                raise StaleEpochError(f"rank {rank} came to epoch {self._table.epoch} meanwhile")
            missing = mine - self._slab.experts()
            if missing:
                raise MigrationError(
                    f"rank {rank} lacks {len(missing)} experts of epoch {target.epoch}: {min(missing)}"
                )
            self._prepared = prepared

    def commit(self, epoch: int) -> None:
        """From now on, vote for a prepared epoch."""
        with self._changed:
            if self._prepared is None or self._prepared.epoch != epoch:
                raise MigrationError(f"rank {self._table.rank} has not prepared epoch {epoch}")
            self._ready = self._prepared

    def await_epoch(self, epoch: int, timeout_s: float) -> None:
        """Return once this epoch, or a later one, is served. Raises MigrationError where that takes too long, or the
        ranks part before."""
        with self._changed:
            self._changed.wait_for(lambda: self._table.epoch >= epoch or self._closed, timeout=timeout_s)
            if self._table.epoch < epoch:
                why = (
                    "the ranks have parted" if self._closed else f"not all ranks voted for it within {timeout_s:.0f} s"
                )
                raise MigrationError(
                    f"epoch {epoch} was committed, but rank {self._table.rank} serves {self._table.epoch}: {why}"
                )

    def abort(self, epoch: int) -> int:
        """Withdraw from an epoch that is not served yet, and free its copies. Returns the epoch that is served.

        A vote that is cast can't be taken back: this waits until the ranks have counted it.
        """
        with self._changed:
            self._ready = self._prepared = None
            counted = self._changed.wait_for(lambda: self._voted is None or self._closed, timeout=self._timeout_s)
            if not counted or self._closed:
                raise MigrationError(f"rank {self._table.rank} waits for the other ranks and can't abort epoch {epoch}")
            if self._table.epoch < epoch:
                self._release_unused()
            return self._table.epoch

    def drop(self, epoch: int) -> int:
        """Free the experts that the served epoch does not give this rank. Returns how many."""
        with self._changed:
            if self._table.epoch != epoch:
                raise StaleEpochError(
                    f"rank {self._table.rank} serves epoch {self._table.epoch}, not {epoch}: nothing is dropped"
                )
            dropped = self._release_unused()
            self._slab.regard(tiers_on(self._table.placement, self._table.rank))
            return dropped

    def vote(self) -> int:
        """The newest epoch that this rank could serve from the next step on."""
        with self._changed:
            self._voted = self._ready
            return self._table.epoch if self._voted is None else self._voted.epoch

    def enter(self, epoch: int) -> None:
        """The votes are counted: every rank could serve this epoch, so every rank serves it from now on."""
        with self._changed:
            if epoch != self._table.epoch:
                assert self._voted is not None and self._voted.epoch == epoch
                for expert in self._voted.leaving:
                    self._cache.forget(expert)
                self._table.switch(self._voted.placement, self._voted.holds)
                self._ready = self._prepared = None
            self._voted = None
            self._changed.notify_all()

    def _release_unused(self) -> int:
        unused = self._slab.experts() - self._table.placement.experts_on(self._table.rank)
        for expert in unused:
            self._slab.release(expert)
        return len(unused)
