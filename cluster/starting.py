"""What a cluster starts with: the plan that its configuration names, the placement that served last, one planned from a
trace, or a linear one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cluster.config import ClusterConfig
from cluster.config import history_path as history_path
from cluster.history import History
from cluster.sources import read_source
from placement.baselines import linear_placement
from placement.core import Placement
from placement.counts import Counts, plan_counts
from placement.errors import ConfigError
from placement.interchange.pieces import Hints
from placement.plan import make_plan
from placement.planfile import Plan, load_plan
from placement.seats import uses_every_rank
from placement.topology import Topology
from placement.trace import UNKNOWN_RANK
from workers.loading import ModelShape, skeleton_shape


def starting_plan(config: ClusterConfig, topology: Topology, history: History) -> Plan:
    """The plan of the first epoch. One that is not the history's last gets an epoch that no plan has used.

    Raises ConfigError where `initial_plan` or `initial_trace` is for other ranks, layers or experts.
    """
    shape = skeleton_shape(config.worker_options())
    measured: dict[str, Any] = {}
    if config.initial_plan is not None:
        placement = load_plan(config.initial_plan).placement
        _check_fits(placement, config, topology, shape)
    else:
        everyone = tuple(range(topology.num_ranks))
        served = history.served(
            lambda plan, seats: (
                seats in ((), everyone)
                and _continues(plan, config, topology, shape)
                and uses_every_rank(plan.placement)
            )
        )
        if served is not None:
            return served
        if config.initial_trace is not None:
            planned = _planned(config, topology, shape)
            placement, measured = planned.placement, planned.measured
        else:
            placement = linear_placement(shape.num_layers, shape.num_experts, topology.num_ranks, config.slots_per_rank)
    return Plan(placement=placement.with_epoch(history.next_epoch()), topology=topology, measured=measured)


def _planned(config: ClusterConfig, topology: Topology, shape: ModelShape) -> Plan:
    """A plan from a trace or counts, recorded elsewhere or before. Raises ConfigError where it is of another model."""
    assert config.initial_trace is not None
    hints = Hints(num_experts=shape.num_experts, num_ranks=topology.num_ranks)
    trace = read_source(str(config.initial_trace), hints)
    mine = trace.load.shape if isinstance(trace, Counts) else (trace.num_layers, trace.num_experts)
    theirs = (shape.num_layers, shape.num_experts)
    if mine != theirs:
        raise ConfigError(
            f"initial_trace '{config.initial_trace}' is of another model: it has {mine[0]} MoE layers x {mine[1]} "
            f"experts, '{config.model}' {theirs[0]} x {theirs[1]}"
        )
    if isinstance(trace, Counts):
        return plan_counts(trace, topology, rows_per_rank=config.slots_per_rank)
    known = trace.source_rank.max() < topology.num_ranks
    if not known:
        # Recorded on a larger cluster: where its requests ran says nothing about this one.
        trace = replace(trace, source_rank=np.full_like(trace.source_rank, UNKNOWN_RANK))
    return make_plan(trace, topology, rows_per_rank=config.slots_per_rank, seed=config.rebalance.seed)


def _continues(served: Plan, config: ClusterConfig, topology: Topology, shape: ModelShape) -> bool:
    """Whether the plan that served last still fits: it does not after a change of model, topology or slots."""
    return served.topology.to_dict() == topology.to_dict() and _size(served.placement) == (
        *(shape.num_layers, shape.num_experts),
        *(topology.num_ranks, config.slots_per_rank),
    )


def _size(placement: Placement) -> tuple[int, int, int, int]:
    return placement.num_layers, placement.num_experts, placement.num_ranks, placement.rows_per_rank


def _check_fits(placement: Placement, config: ClusterConfig, topology: Topology, shape: ModelShape) -> None:
    wanted = (shape.num_layers, shape.num_experts, topology.num_ranks, config.slots_per_rank)
    if _size(placement) != wanted:
        names = ("MoE layers", "experts", "ranks", "slots per rank")
        said = ", ".join(
            f"{mine} {name} (not {theirs})"
            for name, mine, theirs in zip(names, _size(placement), wanted, strict=True)
            if mine != theirs
        )
        raise ConfigError(f"initial_plan '{config.initial_plan}' does not fit this cluster: it is for {said}")
