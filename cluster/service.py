"""The placement service: learns from the trace, plans, stores the plan, and has the ranks enact it.

A plain class over two edges, the history and the ranks; `cluster/actors/service.py` makes it a Ray actor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster import history as states
from cluster.book import Book
from cluster.drifting import DriftCheck
from cluster.enacting import Company, Enactor
from cluster.forming import Meeting, Ranks, form
from cluster.history import History, Member
from cluster.outcomes import PAYS, Formed, RebalanceResult
from cluster.planner import Planner
from cluster.traffic import REFERENCE, Traffic
from placement.errors import MigrationError
from placement.migration import MigrationPlan, plan_migration
from placement.planfile import Plan
from placement.seats import empty_seats
from workers.vitals import Holdings, WorkerStatus

WINDOW_TOKENS = 200_000

logger = logging.getLogger(__name__)


class PlacementService:
    """One cluster's planner and history. Changes are made one after the other; plans are made beside them.

    initial: the plan to start with, for all seats of its topology. connect: the road to some members. The members and
    the epoch that serve are read from the history, so that a service that was killed comes back with them.
    """

    def __init__(
        self,
        *,
        history: History,
        connect: Callable[[Sequence[Member]], Ranks],
        initial: Plan,
        trace_dir: Path,
        min_gain: float,
        seed: int,
        meeting: Meeting,
        window_tokens: int = WINDOW_TOKENS,
    ) -> None:
        self._book = Book(history, initial)
        self._connect = connect
        self._traffic = Traffic(trace_dir, history.path.with_name(REFERENCE), window_tokens=window_tokens)
        self._enactor = Enactor(self._book, self._traffic.mark)
        self._planner = Planner(self._book, self._traffic, min_gain=min_gain, seed=seed)
        self._meeting = meeting
        self._changing = threading.Lock()
        self._planning = threading.Lock()

    @property
    def current(self) -> Plan:
        """The plan of the epoch that is served."""
        return self._book.current

    @property
    def members(self) -> tuple[Member, ...]:
        """Who serves it, in the order of their ranks; none while they form."""
        return self._book.members

    @property
    def history(self) -> History:
        return self._book.history

    # ------------------------------------------------------------------------------------------ who takes part

    def form(self, members: Sequence[Member], reason: str, note: Callable[[str], None] = lambda text: None) -> Formed:
        """Have these members, and nobody else, serve, under an epoch of their own.

        Raises MigrationError where a member fails (the others have left, and can form again), PlacementError where they
        can't hold every expert.
        """
        with self._changing:
            note("forming")
            members = tuple(sorted(members))
            ranks = self._connect(members)
            held: list[Holdings] = ranks.call("leave", [(rank, ()) for rank in range(len(members))])
            plan = self._book.plan_for(members, held, self._planner.load)
            # Of a placement that is taken up again, the traffic since its own decision counts.
            mark = self.history.last_mark() if plan is self._book.initial else None
            self._book.form(plan, members, reason)
            fetched, restored = form(ranks, plan, held, self._meeting)
            self._ranks = ranks
            self._book.now_serves(plan, members)
            detail = {"reason": reason, "seats": self._book.seats, "fetched": fetched, "restored": restored}
            detail["mark"] = self._traffic.mark() if mark is None else mark
            self._book.tell(plan.placement.epoch, states.DONE, detail)
            return Formed(epoch=plan.placement.epoch, members=members, fetched=fetched, restored=restored)

    def plan_for(self, seats: Sequence[int]) -> Plan:
        """What ranks on these seats will most likely serve: for one that is to join, to load its share."""
        return self._book.known(lambda plan, its: its == tuple(seats)) or self._book.initial

    def vacate(self, seats: Sequence[int], note: Callable[[str], None] = lambda text: None) -> None:
        """Move every expert that only these seats hold to the others, live, so that they can leave. Raises
        MigrationError where that was aborted, PlacementError where the others have no room."""
        with self._changing:
            mine = list(self._book.seats)
            staying = [seat for seat in mine if seat not in seats]
            before = self.current
            held = [status.host_slab_bytes for status in self._on_all("status")]
            most_rows = min(held) // self._on_all("expert_bytes")[0] // before.placement.num_layers
            emptied = empty_seats(before.placement, mine, staying, self._planner.load, most_rows=most_rows)
            placement = emptied.with_epoch(self._book.next_epoch())
            plan = Plan(placement=placement, topology=before.topology, measured={})
            self.history.add(plan, members=self.members)
            result = self._enactor.enact(self._company, plan, self._migration(plan), plan_s=0.0, note=note)
        if result.decision != "applied":
            raise MigrationError(f"seats {list(seats)} could not be drained: {result.reason}")

    # ---------------------------------------------------------------------------------------- after a kill

    def resume(self) -> None:
        """Take up what the history says was under way: who served, and a change that was begun is ended or withdrawn.

        For a service that was killed and comes back. A rank that does not answer leaves that to the next forming.
        """
        with self._changing:
            unfinished = self._book.read()
            if not self.members:
                return
            self._ranks = self._connect(self.members)
            for epoch, state in unfinished:
                try:
                    self._enactor.settle(self._company, epoch, state)
                except MigrationError as error:
                    logger.warning("epoch %d was under way and is left to the next forming: %s", epoch, error)

    # ----------------------------------------------------------------------------------------- to a better place

    def statuses(self) -> list[WorkerStatus]:
        """What each rank says of itself. Raises MigrationError where one does not answer."""
        return self._on_all("status")

    def propose(self, most_copies: int | None = None) -> Plan:
        """Plan from what the ranks have recorded, without changing anything. most_copies: as `rebalance`."""
        self._on_all("flush_trace")
        return self._planner.plan(self._planner.recorded(), most_copies)

    def preview(
        self, note: Callable[[str], None] = lambda text: None, *, most_copies: int | None = None
    ) -> RebalanceResult:
        """What a rebalance would do now. Nothing is stored, and nothing is changed."""
        with self._planning:
            note("planning, for show")
            start = time.perf_counter()
            plan = self.propose(most_copies)
            plan_s = time.perf_counter() - start
            reason = self._planner.judge(plan, most_copies)
            migration = self._migration(plan)
        decision, why = ("would apply", PAYS) if reason is None else ("would leave", reason)
        return RebalanceResult(
            decision=decision, reason=why, before=self.current, plan=plan, migration=migration, plan_s=plan_s
        )

    def drift(self) -> DriftCheck:
        """How far the traffic since the last decision is from the traffic that it was made on."""
        with self._planning:
            self._on_all("flush_trace")
            return self._planner.drift()

    def rebalance(
        self, note: Callable[[str], None] = lambda text: None, *, is_gated: bool = True, most_copies: int | None = None
    ) -> RebalanceResult:
        """Plan, ask the gate (unless it is not to be asked), store, enact. note is told each step in a few words.

        With most_copies the placement stays but for so many copies, and shares are drawn anew: the fast loop.
        """
        planner = self._planner
        with self._planning:
            before = self.current
            note("planning")
            start = time.perf_counter()
            self._on_all("flush_trace")
            trace = planner.recorded()
            planner.note_effect()
            plan = planner.plan(trace, most_copies)
            plan_s = time.perf_counter() - start
            base = before.placement.epoch
            with self._changing:
                reason = planner.judge(plan, most_copies) if is_gated else None
                if self.current is not before:
                    reason = "ranks came or went while it was planned; ask again"
                    plan = planner.renewed(plan)
                if reason is not None:
                    planner.keep(trace)
                    self._book.leave(plan, {"reason": reason, "base": base, "mark": self._traffic.mark()})
                    return RebalanceResult(
                        decision="left", reason=reason, before=before, plan=plan, migration=None, plan_s=plan_s
                    )
                self.history.add(plan, detail={"base": base}, members=self.members)
                result = self._enactor.enact(self._company, plan, self._migration(plan), plan_s=plan_s, note=note)
            if result.decision == "applied":
                planner.keep(trace)
            return result

    def _migration(self, plan: Plan) -> MigrationPlan:
        expert_bytes = self._on_all("expert_bytes")[0]
        return plan_migration(self.current.placement, plan.placement, self.current.topology, expert_bytes)

    @property
    def _company(self) -> Company:
        if not self.members:
            raise MigrationError("the ranks are forming; try again in a moment")
        return Company(self._ranks, len(self.members))

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._company.on_all(method, *arguments)
