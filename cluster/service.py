"""The placement service: learns from the trace, plans, stores the plan, and has the ranks enact it.

A plain class over two edges, the history and the ranks; `cluster/actors/service.py` makes it a Ray actor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster import history as states
from cluster.book import Book
from cluster.drifting import DriftCheck, check_drift
from cluster.effect import measure_effect
from cluster.enacting import Company, Enactor
from cluster.forming import Meeting, Ranks, form
from cluster.gate import gate, gate_levelled
from cluster.history import History, Member
from cluster.outcomes import PAYS, Formed, RebalanceResult
from cluster.traffic import REFERENCE, Traffic, as_ranks
from placement.errors import ConfigError, MigrationError, TraceError
from placement.graph import count_load
from placement.levelled import make_levelled_plan
from placement.migration import MigrationPlan, plan_migration
from placement.plan import make_plan
from placement.planfile import Plan
from placement.seats import empty_seats
from placement.topology import Topology
from placement.trace import RoutingTrace
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
        self._min_gain = min_gain
        self._seed = seed
        self._meeting = meeting
        self._load = np.ones((initial.placement.num_layers, initial.placement.num_experts))
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
            plan = self._book.plan_for(members, held, self._load)
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
            emptied = empty_seats(before.placement, mine, staying, self._load, most_rows=most_rows)
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
        return self._plan(self._recorded(), most_copies)

    def preview(
        self, note: Callable[[str], None] = lambda text: None, *, most_copies: int | None = None
    ) -> RebalanceResult:
        """What a rebalance would do now. Nothing is stored, and nothing is changed."""
        with self._planning:
            note("planning, for show")
            start = time.perf_counter()
            plan = self.propose(most_copies)
            plan_s = time.perf_counter() - start
            reason = self._gate(plan, most_copies)
            migration = self._migration(plan)
        decision, why = ("would apply", PAYS) if reason is None else ("would leave", reason)
        return RebalanceResult(
            decision=decision, reason=why, before=self.current, plan=plan, migration=migration, plan_s=plan_s
        )

    def drift(self) -> DriftCheck:
        """How far the traffic since the last decision is from the traffic that it was made on."""
        with self._planning:
            self._on_all("flush_trace")
            self._note_effect()
            check = check_drift(self._traffic, self.history.last_mark(), self._seed)
            self.history.note(self.current.placement.epoch, states.DRIFT, check.to_dict())
            return check

    def _recorded(self) -> RoutingTrace:
        self._on_all("flush_trace")
        trace = as_ranks(self._traffic.recent(), self._book.seats)
        self._load = count_load(trace)[0]
        return trace

    def _plan(self, trace: RoutingTrace, most_copies: int | None) -> Plan:
        current, topology, seed = self.current.placement, self._topology, self._seed
        if most_copies is None:
            plan = make_plan(trace, topology, rows_per_rank=current.rows_per_rank, current=current, seed=seed)
        else:
            plan = make_levelled_plan(trace, topology, current, most_copies=most_copies, seed=seed)
        return replace(plan, placement=plan.placement.with_epoch(self._book.next_epoch()))

    def _gate(self, plan: Plan, most_copies: int | None) -> str | None:
        return (gate if most_copies is None else gate_levelled)(plan.measured, self._min_gain)

    def rebalance(
        self, note: Callable[[str], None] = lambda text: None, *, is_gated: bool = True, most_copies: int | None = None
    ) -> RebalanceResult:
        """Plan, ask the gate (unless it is not to be asked), store, enact. note is told each step in a few words.

        With most_copies the placement stays but for so many copies, and shares are drawn anew: the fast loop.
        """
        with self._planning:
            before = self.current
            note("planning")
            start = time.perf_counter()
            trace = self._recorded()
            self._note_effect()
            plan = self._plan(trace, most_copies)
            plan_s = time.perf_counter() - start
            base = before.placement.epoch
            with self._changing:
                reason = self._gate(plan, most_copies) if is_gated else None
                if self.current is not before:
                    reason = "ranks came or went while it was planned; ask again"
                    plan = replace(plan, placement=plan.placement.with_epoch(self._book.next_epoch()))
                if reason is not None:
                    mark = self._traffic.mark()
                    self._traffic.keep_reference(trace, self._seed)
                    self._book.leave(plan, {"reason": reason, "base": base, "mark": mark})
                    return RebalanceResult(
                        decision="left", reason=reason, before=before, plan=plan, migration=None, plan_s=plan_s
                    )
                self.history.add(plan, detail={"base": base}, members=self.members)
                result = self._enactor.enact(self._company, plan, self._migration(plan), plan_s=plan_s, note=note)
            if result.decision == "applied":
                self._traffic.keep_reference(trace, self._seed)
            return result

    @property
    def _topology(self) -> Topology:
        return self.current.topology

    def _migration(self, plan: Plan) -> MigrationPlan:
        expert_bytes = self._on_all("expert_bytes")[0]
        return plan_migration(self.current.placement, plan.placement, self._topology, expert_bytes)

    def _note_effect(self) -> None:
        """Store what the plan that serves has done since its switch; nothing where nothing was served since."""
        epoch = self.current.placement.epoch
        try:
            base = self.history.base_of(epoch)
            trace = as_ranks(self._traffic.recent(self.history.mark_of(epoch)), self._book.seats)
            before = None if base is None else self.history.plan(base).placement
            self.history.note(epoch, states.MEASURED, measure_effect(self.current, before, trace))
        except TraceError:
            return
        except ConfigError as error:
            logger.warning("the effect of epoch %d is not noted: %s", epoch, error)

    @property
    def _company(self) -> Company:
        if not self.members:
            raise MigrationError("the ranks are forming; try again in a moment")
        return Company(self._ranks, len(self.members))

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._company.on_all(method, *arguments)
