"""The placement service: learns from the trace, plans, stores the plan, and has the ranks enact it.

A plain class over two edges, the history and the ranks; `cluster/actors.py` makes it a Ray actor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cluster import history as states
from cluster.drifting import DriftCheck, check_drift
from cluster.effect import measure_effect
from cluster.history import History
from cluster.traffic import REFERENCE, Traffic
from placement.errors import MigrationError, MoetisError, TraceError
from placement.migration import MigrationPlan, plan_migration
from placement.plan import make_plan
from placement.planfile import Plan
from placement.topology import Topology
from placement.trace import RoutingTrace

if TYPE_CHECKING:
    from workers.worker import WorkerStatus

SWITCH_TIMEOUT_S = 60.0
POLL_S = 0.01
WINDOW_TOKENS = 200_000
PAYS = "the plan pays on held-out requests"


class Ranks(Protocol):
    """How the service reaches the workers: one call on several ranks at once, the answers in the order of the calls.

    Raises MigrationError when a rank fails or can't be reached.
    """

    def call(self, method: str, arguments: Iterable[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        """arguments: (rank, the method's arguments) for each rank to call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceResult:
    """What a rebalance did. decision: 'applied', 'left' (not worth it) or 'aborted'; of a preview 'would apply' or
    'would leave'. plan holds what was measured.

    migration is None where nothing was to be moved. copy_s is the time of the rounds, switch_s from commit to the new
    epoch on every rank.
    """

    decision: str
    reason: str
    before: Plan
    plan: Plan
    migration: MigrationPlan | None
    plan_s: float
    copy_s: float = 0.0
    switch_s: float = 0.0


class PlacementService:
    """One cluster's planner and history. A second rebalance waits for the first."""

    def __init__(
        self,
        *,
        history: History,
        ranks: Ranks,
        initial: Plan,
        trace_dir: Path,
        min_gain: float,
        seed: int,
        window_tokens: int = WINDOW_TOKENS,
    ) -> None:
        self._history = history
        self._ranks = ranks
        self._current = initial
        self._traffic = Traffic(trace_dir, history.path.with_name(REFERENCE), window_tokens=window_tokens)
        self._min_gain = min_gain
        self._seed = seed
        self._lock = threading.Lock()
        if initial.placement.epoch >= history.next_epoch():
            detail = {"reason": "initial placement", "mark": self._traffic.mark()}
            history.add(initial, states.DONE, detail)

    @property
    def current(self) -> Plan:
        """The plan of the epoch that is served."""
        return self._current

    def statuses(self) -> list[WorkerStatus]:
        """What each rank says of itself. Raises MigrationError where one does not answer."""
        return self._on_all("status")

    def propose(self) -> Plan:
        """Plan from what the ranks have recorded, without changing anything."""
        return self._plan(self._recorded())

    def preview(self, note: Callable[[str], None] = lambda text: None) -> RebalanceResult:
        """What a rebalance would do now. Nothing is stored, and nothing is changed."""
        with self._lock:
            note("planning, for show")
            start = time.perf_counter()
            plan = self.propose()
            plan_s = time.perf_counter() - start
            reason = gate(plan.measured, self._min_gain)
            migration = self._migration(plan)
        decision, why = ("would apply", PAYS) if reason is None else ("would leave", reason)
        return RebalanceResult(
            decision=decision, reason=why, before=self._current, plan=plan, migration=migration, plan_s=plan_s
        )

    def drift(self) -> DriftCheck:
        """How far the traffic since the last decision is from the traffic that it was made on."""
        with self._lock:
            self._on_all("flush_trace")
            self._note_effect()
            return check_drift(self._traffic, self._history.last_mark(), self._seed)

    def _recorded(self) -> RoutingTrace:
        self._on_all("flush_trace")
        return self._traffic.recent()

    def _plan(self, trace: RoutingTrace) -> Plan:
        current = self._current.placement
        plan = make_plan(trace, self._topology, rows_per_rank=current.rows_per_rank, current=current, seed=self._seed)
        return Plan(
            placement=plan.placement.with_epoch(self._history.next_epoch()),
            topology=plan.topology,
            measured=plan.measured,
        )

    def rebalance(self, note: Callable[[str], None] = lambda text: None) -> RebalanceResult:
        """Plan, ask the gate, store, enact. note is told each step in a few words."""
        with self._lock:
            before = self._current
            note("planning")
            start = time.perf_counter()
            trace = self._recorded()
            self._note_effect()
            plan = self._plan(trace)
            plan_s = time.perf_counter() - start
            reason = gate(plan.measured, self._min_gain)
            base = before.placement.epoch
            if reason is not None:
                mark = self._traffic.mark()
                self._traffic.keep_reference(trace, self._seed)
                self._history.add(plan, states.LEFT, {"reason": reason, "base": base, "mark": mark})
                return RebalanceResult(
                    decision="left", reason=reason, before=before, plan=plan, migration=None, plan_s=plan_s
                )
            self._history.add(plan, detail={"base": base})
            result = self._enact(before, plan, plan_s, note)
            if result.decision == "applied":
                self._traffic.keep_reference(trace, self._seed)
            return result

    @property
    def _topology(self) -> Topology:
        return self._current.topology

    def _enact(self, before: Plan, plan: Plan, plan_s: float, note: Callable[[str], None]) -> RebalanceResult:
        migration = self._migration(plan)
        copy_s = switch_s = 0.0
        epoch = plan.placement.epoch
        try:
            start = time.perf_counter()
            self._copy(migration, note)
            copy_s = time.perf_counter() - start
            self._on_all("prepare", plan.placement)
            self._history.advance(epoch, states.PREPARED)
            self._history.advance(epoch, states.COMMITTING)
            note("switching the epoch")
            start = time.perf_counter()
            self._on_all("commit", epoch)
            self._wait_for_epoch(epoch)
            switch_s = time.perf_counter() - start
        except MoetisError as error:
            if not self._roll_back(epoch):
                self._history.advance(epoch, states.ABORTED, {"reason": str(error)})
                return RebalanceResult(
                    decision="aborted",
                    reason=str(error),
                    before=before,
                    plan=plan,
                    migration=migration,
                    plan_s=plan_s,
                    copy_s=copy_s,
                )
        self._current = plan
        self._history.advance(epoch, states.SERVING)
        note("dropping old copies")
        self._on_all("drop", epoch)
        self._on_all("flush_trace")
        moved = {"moves": migration.num_moves, "rounds": len(migration.rounds), "bytes": migration.num_bytes}
        times = {"plan_s": plan_s, "copy_s": copy_s, "switch_s": switch_s}
        self._history.advance(epoch, states.DONE, times | moved | {"mark": self._traffic.mark()})
        return RebalanceResult(
            decision="applied",
            reason=PAYS,
            before=before,
            plan=plan,
            migration=migration,
            plan_s=plan_s,
            copy_s=copy_s,
            switch_s=switch_s,
        )

    def _migration(self, plan: Plan) -> MigrationPlan:
        expert_bytes = self._on_all("expert_bytes")[0]
        return plan_migration(self._current.placement, plan.placement, self._topology, expert_bytes)

    def _note_effect(self) -> None:
        """Store what the plan that serves has done since its switch; nothing where nothing was served since."""
        epoch = self._current.placement.epoch
        base = self._history.base_of(epoch)
        try:
            trace = self._traffic.recent(self._history.mark_of(epoch))
        except TraceError:
            return
        before = None if base is None else self._history.plan(base).placement
        self._history.measured(epoch, measure_effect(self._current, before, trace))

    def _copy(self, migration: MigrationPlan, note: Callable[[str], None]) -> None:
        for number, moves in enumerate(migration.rounds):
            note(f"copying round {number + 1} of {len(migration.rounds)}")
            self._history.advance(migration.target_epoch, states.COPYING, {"round": number})
            busy = sorted({rank for move in moves for rank in (move.source.rank, move.target.rank)})
            self._ranks.call("copy_round", [(rank, (migration.target_epoch, moves)) for rank in busy])

    def _wait_for_epoch(self, epoch: int) -> None:
        deadline = time.monotonic() + SWITCH_TIMEOUT_S
        while True:
            served = [status.epoch for status in self._on_all("status")]
            if all(other == epoch for other in served):
                return
            if time.monotonic() > deadline:
                raise MigrationError(f"epoch {epoch} was committed, but the ranks serve {served}")
            time.sleep(POLL_S)

    def _roll_back(self, epoch: int) -> bool:
        """Withdraw the plan on every rank. True if it is too late: every rank already serves it."""
        served: Sequence[int] = self._on_all("abort", epoch)
        return all(other == epoch for other in served)

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._ranks.call(method, [(rank, arguments) for rank in range(self._topology.num_ranks)])


def gate(measured: dict[str, Any], min_gain: float) -> str | None:
    """Why a plan is not worth enacting, from its held-out figures, or None if it is.

    It must save min_gain of the other-node visits, and the 95% interval over requests must leave no doubt of a gain.
    """
    visits = measured["trust"]["after_over_before"]
    gain = 1 - visits["ratio"]
    if gain < min_gain:
        return (
            f"it would save {gain:.1%} of other-node visits on held-out requests; at least {min_gain:.1%} is asked for"
        )
    if not visits["holds"]:
        low, high = 1 - visits["high"], 1 - visits["low"]
        return (
            f"it would save {gain:.1%} of other-node visits, but {visits['num_requests']} held-out requests leave room "
            f"for no gain at all (95% interval {low:.1%} to {high:.1%}); record more traffic"
        )
    return None
