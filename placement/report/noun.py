"""The Report: every number that a page about a plan shows, made from the plan and a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.evaluate import check_fit, replay
from placement.graph import count_coactivation, count_load
from placement.homes import homes_of
from placement.migration import MigrationPlan, plan_migration
from placement.planfile import Plan
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
    """What a page shows. scores: by placement ('before', 'eplb', 'after', ...), `Score.to_dict`s; empty if unmeasured.

    load [L, E]: (token, expert) pairs over the layer's mean. holders[layer][expert]: the ranks that hold it.
    coactivation: (layer, order [n] of experts by rank, share [n, n] of tokens that use both) of a few layers.
    rank_load_before, rank_load_after [R]: pairs served over the mean of the ranks, all layers together.
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
    scores: dict[str, dict[str, Any]]
    load: NDArray[np.float64]
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    coactivation: tuple[tuple[int, NDArray[np.intp], NDArray[np.float64]], ...]
    rank_load_before: NDArray[np.float64] | None
    rank_load_after: NDArray[np.float64]
    rounds: tuple[RoundFigure, ...]
    live: tuple[LiveFigure, ...]

    @property
    def topology(self) -> Topology:
        return self.plan.topology

    @property
    def gain(self) -> float | None:
        """The share of other-node visits that the plan saves on held-out requests; None where it was not measured."""
        if "before" not in self.scores or not self.scores["before"]["nodes_visited"]:
            return None
        return float(1 - self.scores["after"]["nodes_visited"] / self.scores["before"]["nodes_visited"])


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

    migration is planned here unless given; without expert_bytes its rounds count experts only. Raises TraceError or
    TopologyError where the plan and the trace are not of one model and cluster.
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
        scores={name: value for name, value in plan.measured.items() if "nodes_visited" in value},
        load=load / load.mean(axis=1, keepdims=True),
        holders=_holders(plan.placement),
        coactivation=tuple(_coactivation(plan.placement, layer, trace) for layer in _some_layers(trace)),
        rank_load_before=None if before is None else _rank_load(before, plan.topology, trace),
        rank_load_after=_rank_load(plan.placement, plan.topology, trace),
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


def _rank_load(placement: Placement, topology: Topology, trace: RoutingTrace) -> NDArray[np.float64]:
    one_step = np.zeros(trace.num_tokens, np.int32)
    counts = replay(placement, topology, trace, homes_of(trace, topology.num_ranks), one_step)
    load = counts.load.sum(axis=(0, 1)).astype(np.float64)
    over_mean: NDArray[np.float64] = load / load.mean()
    return over_mean


def _rounds(migration: MigrationPlan) -> tuple[RoundFigure, ...]:
    return tuple(
        RoundFigure(
            pairs=len({frozenset((move.source.rank, move.target.rank)) for move in moves}),
            moves=len(moves),
            num_bytes=len(moves) * migration.expert_bytes,
        )
        for moves in migration.rounds
    )
