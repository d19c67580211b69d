"""Enacting: from the epoch that ranks serve to another, beside the traffic, and the way back where something fails.

Copy, prepare, commit, drop. Until the commit is counted the old epoch serves everywhere; each step is in the history
before it is made, so that a service that was killed can end or withdraw what it finds under way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster import history as states
from cluster.book import Book
from cluster.forming import Ranks
from cluster.outcomes import PAYS, RebalanceResult
from cluster.traffic import Mark
from placement.errors import MigrationError, MoetisError
from placement.migration import MigrationPlan
from placement.planfile import Plan

SWITCH_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Company:
    """The ranks that serve together, and how many they are."""

    ranks: Ranks
    size: int

    def on_all(self, method: str, *arguments: Any) -> list[Any]:
        return self.ranks.call(method, [(rank, arguments) for rank in range(self.size)])

    def roll_back(self, epoch: int) -> bool:
        """Withdraw an epoch on every rank. True if it is too late: every rank already serves it."""
        return all(served == epoch for served in self.on_all("abort", epoch))


class Enactor:
    """Changes the epoch of a company. mark tells where the trace ends now."""

    def __init__(self, book: Book, mark: Callable[[], Mark]) -> None:
        self._book = book
        self._mark = mark

    def enact(
        self, company: Company, plan: Plan, migration: MigrationPlan, *, plan_s: float, note: Note
    ) -> RebalanceResult:
        """Have the company serve a plan that is stored already. decision is 'applied' or 'aborted'."""
        epoch = plan.placement.epoch
        result = RebalanceResult(
            decision="applied",
            reason=PAYS,
            before=self._book.current,
            plan=plan,
            migration=migration,
            plan_s=plan_s,
        )
        try:
            start = time.perf_counter()
            self._copy(company, migration, note)
            result = replace(result, copy_s=time.perf_counter() - start)
            note("preparing")
            company.on_all("prepare", plan.placement)
            self._book.history.advance(epoch, states.PREPARED)
            self._book.history.advance(epoch, states.COMMITTING)
            note("switching the epoch")
            start = time.perf_counter()
            company.on_all("commit", epoch)
            company.on_all("await_epoch", epoch, SWITCH_TIMEOUT_S)
            result = replace(result, switch_s=time.perf_counter() - start)
        except MoetisError as error:
            if not self._came_through(company, epoch, error):
                return replace(result, decision="aborted", reason=str(error))
        self._book.now_serves(plan, self._book.members)
        self._book.tell(epoch, states.SERVING)
        note("dropping old copies")
        self._drop(company, result, migration)
        return result

    def settle(self, company: Company, epoch: int, state: str) -> None:
        """End or withdraw an epoch that a service which was killed had under way."""
        if company.roll_back(epoch):
            self._book.now_serves(self._book.history.plan(epoch), self._book.members)
            company.on_all("drop", epoch)
            self._book.tell(epoch, states.DONE, {"reason": "ended after the service came back"})
        else:
            self._book.tell(epoch, states.ABORTED, {"reason": f"the service was killed when it was {state}"})

    def _copy(self, company: Company, migration: MigrationPlan, note: Note) -> None:
        for number, moves in enumerate(migration.rounds):
            note(f"copying round {number + 1} of {len(migration.rounds)}")
            self._book.history.advance(migration.target_epoch, states.COPYING, {"round": number})
            busy = sorted({rank for move in moves for rank in (move.source.rank, move.target.rank)})
            company.ranks.call("copy_round", [(rank, (migration.target_epoch, moves)) for rank in busy])

    def _came_through(self, company: Company, epoch: int, error: MoetisError) -> bool:
        """Something failed: withdraw the plan on every rank. True if it is too late, and every rank serves it."""
        try:
            if company.roll_back(epoch):
                return True
        except MigrationError as lost:
            # The ranks that are left will form anew, from whatever they serve; that settles this epoch too.
            logger.warning("epoch %d could not be withdrawn: %s", epoch, lost)
            return False
        self._book.tell(epoch, states.ABORTED, {"reason": str(error)})
        return False

    def _drop(self, company: Company, result: RebalanceResult, migration: MigrationPlan) -> None:
        epoch = migration.target_epoch
        moved = {"moves": migration.num_moves, "rounds": len(migration.rounds), "bytes": migration.num_bytes}
        times = {"plan_s": result.plan_s, "copy_s": result.copy_s, "switch_s": result.switch_s}
        try:
            company.on_all("drop", epoch)
            company.on_all("flush_trace")
            self._book.tell(epoch, states.DONE, times | moved | {"mark": self._mark()})
        except MigrationError as error:
            logger.warning("epoch %d serves, but old copies stay for now: %s", epoch, error)
