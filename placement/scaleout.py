"""Clusters that do not exist yet: cut into equal expert-parallel groups, other links, seen through fewer layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.errors import ConfigError, TopologyError
from placement.topology import Topology
from placement.trace import RoutingTrace

MOST_GROUP_GPUS, MOST_PLANNED_GPUS = 320, 1152


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOut:
    """A cluster of num_groups equal groups of GPUs, each with all experts and tokens of its own. group: one's tree.

    One plan serves all groups: their traffic is of one kind. Nothing is exchanged between groups in a MoE layer.
    """

    group: Topology
    num_groups: int

    @property
    def num_gpus(self) -> int:
        return self.num_groups * self.group.num_ranks


def scale_out(topology: Topology, num_experts: int, group_gpus: int | None = None) -> ScaleOut:
    """Cut a cluster into expert-parallel groups of whole nodes, or of a part of one node each.

    group_gpus: GPUs that share one set of experts; unless given, as many whole nodes as divide the cluster evenly with
    at most 320 GPUs and one expert a GPU at least (so large as expert parallelism is run in practice).
    Raises ConfigError where groups would not be equal, or are too large to plan for.
    """
    sizes = np.bincount(topology.node_of_rank())
    if len(set(sizes.tolist())) > 1 and group_gpus not in (None, topology.num_ranks):
        raise TopologyError(
            f"topology '{topology.name}': nodes of {sizes.min()} to {sizes.max()} GPUs make no equal groups"
        )
    chosen = _default_group(topology, num_experts) if group_gpus is None else group_gpus
    width, total = int(sizes[0]), topology.num_ranks
    if chosen < 1 or (chosen != total and (total % chosen or (chosen % width and width % chosen))):
        raise ConfigError(
            f"{chosen} GPUs that share experts must divide the {total} GPUs of topology '{topology.name}' "
            f"into whole nodes of {width} (or parts of one)"
        )
    if chosen > MOST_PLANNED_GPUS:
        raise ConfigError(
            f"{chosen} GPUs that share one set of experts are more than the {MOST_PLANNED_GPUS} that can be planned "
            f"for; give fewer, and the cluster is simulated as several such groups"
        )
    return ScaleOut(group=_first_ranks(topology, chosen), num_groups=total // chosen)


def _default_group(topology: Topology, num_experts: int) -> int:
    sizes = np.bincount(topology.node_of_rank())
    most = min(MOST_GROUP_GPUS, num_experts)
    if topology.num_ranks <= most or len(set(sizes.tolist())) > 1:
        return topology.num_ranks
    width, nodes = int(sizes[0]), topology.num_nodes
    fitting = [number for number in range(1, nodes + 1) if nodes % number == 0 and number * width <= most]
    return max(fitting, default=1) * width


def _first_ranks(topology: Topology, number: int) -> Topology:
    groups = topology.groups[:, :number]
    return replace(topology, groups=groups) if number < topology.num_ranks else topology


def with_nic(topology: Topology, gb_s: float) -> Topology:
    """The same tree with other links between nodes (and above); latencies stay. Raises ConfigError for no bandwidth."""
    if not 0 < gb_s < 1e6:
        raise ConfigError(f"a link between nodes carries more than 0 GB/s, got {gb_s:g}")
    links = tuple(
        replace(link, bandwidth=gb_s * 1e9) if level <= topology.node_level else link
        for level, link in enumerate(topology.links)
    )
    return replace(topology, links=links)


def sample_layers(trace: RoutingTrace, most: int) -> tuple[RoutingTrace, NDArray[np.int64]]:
    """The trace with at most so many of its layers, evenly spread, and which: layers differ little in cost."""
    layers = np.unique(np.linspace(0, trace.num_layers - 1, min(most, trace.num_layers)).round().astype(np.int64))
    if len(layers) == trace.num_layers:
        return trace, layers
    gates = None if trace.gate_weight is None else trace.gate_weight[:, layers]
    # A sample is no model: which hidden layers these were is in the second result.
    return replace(trace, experts=trace.experts[:, layers], gate_weight=gates, layers=None), layers
