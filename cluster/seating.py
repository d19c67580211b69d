"""Where the workers' actors go: a placement group with a bundle a rank, each on a node with the labels it must have."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.errors import ConfigError, MoetisError
from placement.topology import Topology

READY_TIMEOUT_S = 120.0
Labels = dict[str, str]


def selectors_of(topology: Topology, node_labels: Sequence[Labels]) -> list[Labels]:
    """The labels that each rank's node must have. node_labels: of each node of the topology, in order; none: any node.

    Raises ConfigError where they are not one set a node, or two nodes have the same.
    """
    if not node_labels:
        return [{} for _ in range(topology.num_ranks)]
    if len(node_labels) != topology.num_nodes:
        raise ConfigError(
            f"ray.node_labels has {len(node_labels)} entries; topology '{topology.name}' has {topology.num_nodes} nodes"
        )
    seen: dict[tuple[tuple[str, str], ...], int] = {}
    for node, labels in enumerate(node_labels):
        first = seen.setdefault(tuple(sorted(labels.items())), node)
        if first != node:
            raise ConfigError(f"ray.node_labels: nodes {first} and {node} have the same labels, {labels}")
    return [node_labels[node] for node in topology.node_of_rank()]


def reserve(topology: Topology, node_labels: Sequence[Labels], *, num_gpus: float) -> PlacementGroup:
    """Reserve a CPU, and a GPU if need be, for each rank; they are free again when the driver ends.

    Raises ConfigError for wrong labels, MoetisError where there is no room.
    """
    selectors = selectors_of(topology, node_labels)
    bundle: dict[str, float] = {"CPU": 1} | ({"GPU": num_gpus} if num_gpus else {})
    group = placement_group(
        [dict(bundle) for _ in selectors],
        strategy="PACK",
        bundle_label_selector=selectors if any(selectors) else None,
    )
    if not group.wait(timeout_seconds=READY_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        wanted = ", ".join(sorted({str(labels) for labels in selectors})) if any(selectors) else "any node"
        raise MoetisError(
            f"Ray has no room for {len(selectors)} workers of {bundle} on {wanted} within {READY_TIMEOUT_S:.0f} s"
        )
    return group


def seat_strategy(group: PlacementGroup, seat: int) -> PlacementGroupSchedulingStrategy:
    """How Ray is told to start the actor of a seat."""
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=seat)
