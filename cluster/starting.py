"""What a cluster starts with: the placement that served last, the one that its configuration names, or a linear one."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ClusterConfig
from cluster.history import History
from placement.baselines import linear_placement
from placement.core import Placement
from placement.errors import ConfigError
from placement.planfile import Plan, load_plan
from placement.topology import Topology
from workers.loading import ModelShape, skeleton_shape

HISTORY_FILE = "history.sqlite"


def history_path(config: ClusterConfig) -> Path:
    return (config.run_dir / HISTORY_FILE).absolute()


def starting_plan(config: ClusterConfig, topology: Topology, history: History) -> Plan:
    """The plan of the first epoch. One that is not the history's last gets an epoch that no plan has used.

    Raises ConfigError where `initial_plan` is for other ranks, layers or experts.
    """
    shape = skeleton_shape(config.worker_options())
    if config.initial_plan is not None:
        placement = load_plan(config.initial_plan).placement
        _check_fits(placement, config, topology, shape)
    else:
        served = history.served()
        if served is not None and _continues(served, config, topology, shape):
            return served
        placement = linear_placement(shape.num_layers, shape.num_experts, topology.num_ranks, config.slots_per_rank)
    return Plan(placement=placement.with_epoch(history.next_epoch()), topology=topology, measured={})


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
