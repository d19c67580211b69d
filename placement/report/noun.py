"""The Report: every number that a page about a plan shows, made from the plan and a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.evaluate import check_fit
from placement.graph import count_coactivation, count_load
from placement.migration import MigrationPlan, plan_migration
from placement.planfile import Plan
from placement.report.measured import Measured, read_measured
from placement.report.traffic import Traffic, count_traffic
from placement.topology import Topology
from placement.trace import RoutingTrace

# Maps of all pairs of a layer's experts are the bulk of a page: as many layers as stay under this many cells.
MAX_LAYERS_WITH_COACTIVATION, MAX_COACTIVATION_CELLS = 4, 70_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFigure:
    """One measured row that only a running cluster can give. before is None where there is only one value."""

    name: str
    before: float | None
    after: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigure:
    """One round of a migration: pairs of ranks that exchange experts, experts copied, bytes."""

    pairs: int
    moves: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page shows. before_epoch: of the placement that the plan would replace; None where none was given.

    load [L, E]: (token, expert) pairs over the layer's mean. holders[layer][expert]: the ranks that hold it.
    coactivation: (layer, order [n] of experts by rank, share [n, n] of tokens that use both) of a few layers.
    traffic_before, traffic_after: of this trace, by the two placements.
    """

    title: str
    plan: Plan
    model: str
    top_k: int
    num_tokens: int
    num_requests: int
    sampling_rate: float
    homes_recorded: bool
    workloads: tuple[str, ...]
    measured: Measured
    before_epoch: int | None
    load: NDArray[np.float64]
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    coactivation: tuple[tuple[int, NDArray[np.intp], NDArray[np.float64]], ...]
    traffic_before: Traffic | None
    traffic_after: Traffic
    rounds: tuple[RoundFigure, ...]
    live: tuple[LiveFigure, ...]

    @property
    def topology(self) -> Topology:
        return self.plan.topology


def make_report(
    plan: Plan,
    trace: RoutingTrace,
    *,
    before: Placement | None = None,
    live: tuple[LiveFigure, ...] = (),
    migration: MigrationPlan | None = None,
    expert_bytes: int = 1,
    title: str = "Moetis placement report",
) -> Report:
    """Gather a report. before: the placement that the plan would replace, for its moves and the load per rank.

    migration is planned here unless given; without expert_bytes its rounds count experts only. Raises TraceError,
    TopologyError or PlacementError where plan, trace and before are not of one model and cluster, and PlacementError
    where `plan.measured` is not what it should be.
    """
    check_fit(plan.placement, plan.topology, trace)
    load = count_load(trace)[0].astype(np.float64)
    if migration is None and before is not None and before.epoch < plan.placement.epoch:
        migration = plan_migration(before, plan.placement, plan.topology, expert_bytes)
    return Report(
        title=title,
        plan=plan,
        model=trace.model,
        top_k=trace.top_k,
        num_tokens=trace.num_tokens,
        num_requests=trace.num_requests,
        sampling_rate=trace.sampling_rate,
        homes_recorded=bool(trace.source_rank.min() >= 0),
        workloads=trace.workload_names,
        measured=read_measured(plan.measured),
        before_epoch=None if before is None else before.epoch,
        load=load / load.mean(axis=1, keepdims=True),
        holders=_holders(plan.placement),
        coactivation=tuple(_coactivation(plan.placement, layer, trace) for layer in _some_layers(trace)),
        traffic_before=None if before is None else count_traffic(before, plan.topology, trace),
        traffic_after=count_traffic(plan.placement, plan.topology, trace),
        rounds=() if migration is None else _rounds(migration),
        live=live,
    )


def _holders(placement: Placement) -> tuple[tuple[tuple[int, ...], ...], ...]:
    holds = placement.copies_per_rank()
    return tuple(
        tuple(tuple(np.flatnonzero(layer[:, expert]).tolist()) for expert in range(placement.num_experts))
        for layer in holds
    )


def _some_layers(trace: RoutingTrace) -> list[int]:
    most = max(1, min(MAX_LAYERS_WITH_COACTIVATION, MAX_COACTIVATION_CELLS // trace.num_experts**2))
    count = min(most, trace.num_layers)
    return sorted({int(layer) for layer in np.linspace(0, trace.num_layers - 1, count)})


def _coactivation(
    placement: Placement, layer: int, trace: RoutingTrace
) -> tuple[int, NDArray[np.intp], NDArray[np.float64]]:
    row = placement.physical_to_logical[layer]
    order = np.array(list(dict.fromkeys(row[row >= 0].tolist())), np.intp)
    pairs = count_coactivation(trace.experts[:, layer], trace.num_experts)
    share = pairs[np.ix_(order, order)] / trace.num_tokens
    return layer, order, share


def _rounds(migration: MigrationPlan) -> tuple[RoundFigure, ...]:
    return tuple(
        RoundFigure(
            pairs=len({frozenset((move.source.rank, move.target.rank)) for move in moves}),
            moves=len(moves),
            num_bytes=len(moves) * migration.expert_bytes,
        )
        for moves in migration.rounds
    )
