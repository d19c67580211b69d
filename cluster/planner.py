"""The planner: what the service makes of the traffic: plans and their verdicts, drift, and what the last plan did."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from cluster import history as states
from cluster.book import Book
from cluster.drifting import DriftCheck, check_drift
from cluster.effect import measure_effect
from cluster.gate import gate, gate_levelled
from cluster.traffic import Traffic, as_ranks
from placement.errors import ConfigError, TraceError
from placement.graph import count_load
from placement.levelled import make_levelled_plan
from placement.plan import make_plan
from placement.planfile import Plan
from placement.trace import RoutingTrace

logger = logging.getLogger(__name__)


class Planner:
    """Plans for whoever the book says serves, from traffic that ranks have written to disk.

    load [L, E]: of the experts, as last recorded; all alike before that.
    """

    def __init__(self, book: Book, traffic: Traffic, *, min_gain: float, seed: int) -> None:
        self._book = book
        self._traffic = traffic
        self._min_gain = min_gain
        self._seed = seed
        placement = book.initial.placement
        self.load = np.ones((placement.num_layers, placement.num_experts))

    def recorded(self) -> RoutingTrace:
        """The newest traffic, by the ranks that serve now. Raises TraceError where there is none."""
        trace = as_ranks(self._traffic.recent(), self._book.seats)
        self.load = count_load(trace)[0]
        return trace

    def plan(self, trace: RoutingTrace, most_copies: int | None) -> Plan:
        """Under an epoch of its own. With most_copies shares alone are drawn anew, and so many experts copied."""
        current, topology, seed = self._book.current.placement, self._book.current.topology, self._seed
        if most_copies is None:
            plan = make_plan(trace, topology, rows_per_rank=current.rows_per_rank, current=current, seed=seed)
        else:
            plan = make_levelled_plan(trace, topology, current, most_copies=most_copies, seed=seed)
        return self.renewed(plan)

    def renewed(self, plan: Plan) -> Plan:
        """The plan under the next epoch."""
        return replace(plan, placement=plan.placement.with_epoch(self._book.next_epoch()))

    def judge(self, plan: Plan, most_copies: int | None) -> str | None:
        """Why a plan is not worth enacting, or None if it is."""
        return (gate if most_copies is None else gate_levelled)(plan.measured, self._min_gain)

    def keep(self, trace: RoutingTrace) -> None:
        """This is what the last decision was made on."""
        self._traffic.keep_reference(trace, self._seed)

    def drift(self) -> DriftCheck:
        """How far the traffic since the last decision is from the traffic that it was made on; stored, as is what the
        plan that serves has done."""
        self.note_effect()
        check = check_drift(self._traffic, self._book.history.last_mark(), self._seed)
        self._book.history.note(self._book.current.placement.epoch, states.DRIFT, check.to_dict())
        return check

    def note_effect(self) -> None:
        """Store what the plan that serves has done since its switch; nothing where nothing was served since."""
        book = self._book
        epoch = book.current.placement.epoch
        try:
            base = book.history.base_of(epoch)
            trace = as_ranks(self._traffic.recent(book.history.mark_of(epoch)), book.seats)
            before = None if base is None else book.history.plan(base).placement
            book.history.note(epoch, states.MEASURED, measure_effect(book.current, before, trace))
        except TraceError:
            return
        except ConfigError as error:
            logger.warning("the effect of epoch %d is not noted: %s", epoch, error)
