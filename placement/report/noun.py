"""The Report: every number that a page about a plan shows, made from the plan and a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.counts import Counts, check_counts
from placement.errors import TraceError
from placement.evaluate import check_fit
from placement.graph import count_load
from placement.migration import MigrationPlan, plan_migration
from placement.planfile import Plan
from placement.report.activation import Activation, count_activation
from placement.report.affinity import PairMap, coactivation_maps, transition_maps
from placement.report.cachecurve import CacheCurve, cache_curve
from placement.report.measured import Measured, read_measured
from placement.report.memory import Memory, count_memory
from placement.report.partly import Part, best_part, copies_by_layer
from placement.report.promises import PastEpoch
from placement.report.rounds import RoundFigure, round_figures
from placement.report.traffic import Traffic, count_traffic, spread_counts
from placement.topology import Topology
from placement.trace import RoutingTrace

# Tokens times layers times top-k that the charts look at; beyond, every n-th token is taken.
MAX_CHOICES = 12_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFigure:
    """One measured row that only a running cluster can give. before is None where there is only one value."""

    name: str
    before: float | None
    after: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the model's parts take, as far as it is known: the weights of one expert, one hidden state as it is sent.

    origin: where that is from, in words.
    """

    expert_bytes: int | None = None
    token_bytes: float | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page shows. before_epoch: of the placement that the plan would replace; None where none was given.

    num_tokens, num_requests: of the trace; sampled_tokens: those that the charts show. load [L, E]: (token, expert)
    pairs over the layer's mean. holders[layer][expert]: the ranks that hold it. traffic_before, traffic_after: of the
    sampled tokens, by the two placements. part: of the plan, that brings nearly all of it. From counts alone there is
    load and no more: no tokens, activation, pairs, cache, and traffic without visits; counted then names their source.
    """

    title: str
    plan: Plan
    model: str
    top_k: int
    num_tokens: int
    sampled_tokens: int
    num_requests: int
    sampling_rate: float
    homes_recorded: bool
    workloads: tuple[str, ...]
    measured: Measured
    sizes: Sizes
    before_epoch: int | None
    load: NDArray[np.float64]
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    activation: Activation | None
    coactivation: tuple[PairMap, ...]
    transitions: tuple[PairMap, ...]
    traffic_before: Traffic | None
    traffic_after: Traffic
    memory: Memory
    cache: CacheCurve | None
    rounds: tuple[RoundFigure, ...]
    part: Part | None
    live: tuple[LiveFigure, ...]
    past: tuple[PastEpoch, ...]
    counted: str | None = None

    @property
    def topology(self) -> Topology:
        return self.plan.topology


def make_report(
    plan: Plan,
    trace: RoutingTrace,
    *,
    before: Placement | None = None,
    live: tuple[LiveFigure, ...] = (),
    past: tuple[PastEpoch, ...] = (),
    migration: MigrationPlan | None = None,
    sizes: Sizes = Sizes(),
    title: str = "Moetis placement report",
) -> Report:
    """Gather a report. before: the placement that the plan would replace, for its moves and the load per rank.

    migration is planned here unless given; without an expert's size its rounds count experts only. Raises TraceError,
    TopologyError or PlacementError where plan, trace and before are not of one model and cluster, and PlacementError
    where `plan.measured` is not what it should be.
    """
    check_fit(plan.placement, plan.topology, trace)
    shown = _sample(trace)
    judged = _held_out(shown)
    after = count_traffic(plan.placement, plan.topology, shown, judged)
    old = None if before is None else count_traffic(before, plan.topology, shown, judged)
    part = None
    if before is not None and old is not None and before.epoch < plan.placement.epoch:
        part = best_part(old.nodes_by_layer, after.nodes_by_layer, copies_by_layer(before, plan.placement))
    load = count_load(shown)[0].astype(np.float64)
    return Report(
        title=title,
        plan=plan,
        model=trace.model,
        top_k=trace.top_k,
        num_tokens=trace.num_tokens,
        sampled_tokens=shown.num_tokens,
        num_requests=trace.num_requests,
        sampling_rate=trace.sampling_rate,
        homes_recorded=bool(trace.source_rank.min() >= 0),
        workloads=trace.workload_names,
        measured=read_measured(plan.measured),
        sizes=sizes,
        before_epoch=None if before is None else before.epoch,
        load=load / load.mean(axis=1, keepdims=True),
        holders=_holders(plan.placement),
        activation=count_activation(shown),
        coactivation=coactivation_maps(plan.placement, shown),
        transitions=transition_maps(plan.placement, shown),
        traffic_before=old,
        traffic_after=after,
        memory=count_memory(plan.placement),
        cache=cache_curve(plan.placement, plan.topology, trace),
        rounds=_rounds(plan, before, migration, sizes),
        part=part,
        live=live,
        past=past,
    )


def make_counts_report(
    plan: Plan,
    counts: Counts,
    *,
    before: Placement | None = None,
    past: tuple[PastEpoch, ...] = (),
    sizes: Sizes = Sizes(),
    title: str = "Moetis placement report",
) -> Report:
    """A report from expert counts alone: load of experts and ranks, memory, migration. Raises as `make_report`."""
    for placement in (plan.placement, before):
        if placement is not None:
            check_counts(placement, plan.topology, counts)
    mean = counts.load.mean(axis=1, keepdims=True)
    return Report(
        title=title,
        plan=plan,
        model="",
        top_k=0,
        num_tokens=0,
        sampled_tokens=0,
        num_requests=0,
        sampling_rate=1.0,
        homes_recorded=False,
        workloads=(),
        measured=read_measured(plan.measured),
        sizes=sizes,
        before_epoch=None if before is None else before.epoch,
        load=counts.load / np.where(mean > 0, mean, 1.0),
        holders=_holders(plan.placement),
        activation=None,
        coactivation=(),
        transitions=(),
        traffic_before=None if before is None else spread_counts(before, counts),
        traffic_after=spread_counts(plan.placement, counts),
        memory=count_memory(plan.placement),
        cache=None,
        rounds=_rounds(plan, before, None, sizes),
        part=None,
        live=(),
        past=past,
        counted=counts.source,
    )


def _rounds(
    plan: Plan, before: Placement | None, migration: MigrationPlan | None, sizes: Sizes
) -> tuple[RoundFigure, ...]:
    """Of the migration, which is planned here unless given; none where the plan does not follow on."""
    if migration is None and before is not None and before.epoch < plan.placement.epoch:
        migration = plan_migration(before, plan.placement, plan.topology, sizes.expert_bytes or 1)
    if migration is None:
        return ()
    return round_figures(migration, plan.topology, sized=sizes.expert_bytes is not None)


def _sample(trace: RoutingTrace) -> RoutingTrace:
    """Every n-th token where there are very many, in the order of the trace."""
    every = -(-trace.num_tokens * trace.num_layers * trace.top_k // MAX_CHOICES)
    return trace if every <= 1 else trace.select(np.arange(0, trace.num_tokens, every))


def _held_out(trace: RoutingTrace) -> NDArray[np.bool_] | None:
    """The tokens [T] that `moetis plan` does not fit on; None (all) where there is one request."""
    try:
        _, held_out = trace.split_by_request()
    except TraceError:
        return None
    return np.isin(trace.request, held_out.request)


def _holders(placement: Placement) -> tuple[tuple[tuple[int, ...], ...], ...]:
    holds = placement.copies_per_rank()
    return tuple(
        tuple(tuple(np.flatnonzero(layer[:, expert]).tolist()) for expert in range(placement.num_experts))
        for layer in holds
    )
