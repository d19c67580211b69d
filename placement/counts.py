"""Plans from expert counts alone: level load, copies spread over nodes. Which experts go together is not known then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.baselines import balance_placement, eplb_placement, linear_placement
from placement.core import EMPTY, Placement
from placement.errors import TopologyError, TraceError
from placement.evaluate import max_over_mean
from placement.layers import ModelLayers
from placement.matching import match_labels
from placement.planfile import Plan
from placement.shares import load_per_rank
from placement.topology import Topology

COUNTS_KEY = "counts"
MOST_COUNTED = 1e18
# Loads of two workloads of one model differ by 30 to 50% an expert (DeepSeek-V3's counts), so that a finer balance than
# this is a fit to noise: on other workloads it was 0.007 worse than EPLB's greedy in the mean, and up to 0.036.
LEVEL_ENOUGH = 1.03
AFFINITY_UNKNOWN = (
    "made from counts alone: load is levelled, but which experts are used together is unknown, "
    "so nothing can be said about nodes visited"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """load [L, E]: how often each expert was chosen, counts or rates. source names file and key, for messages.

    layers: which hidden layers of the model the L layers are, None where that is unknown.

    Raises TraceError where a value is no count, or nothing was counted.
    """

    load: NDArray[np.float64]
    source: str
    layers: ModelLayers | None = None

    def __post_init__(self) -> None:
        if self.load.ndim != 2 or 0 in self.load.shape:
            raise TraceError(f"{self.source}: counts must be [layers, experts], got {self.load.shape}")
        wrong = np.argwhere(~((self.load >= 0) & (self.load <= MOST_COUNTED)))
        if len(wrong):
            layer, expert = wrong[0]
            raise TraceError(
                f"{self.source}: layer {layer}, expert {expert} has a count of {self.load[layer, expert]}; "
                f"counts are from 0 to {MOST_COUNTED:g}"
            )
        if self.layers is not None and len(self.layers.moe) != len(self.load):
            raise TraceError(
                f"{self.source}: {len(self.layers.moe)} MoE layers are named, but {len(self.load)} counted"
            )
        if not self.load.any():
            raise TraceError(f"{self.source}: every count is 0; there is nothing to plan from")

    @property
    def counted(self) -> NDArray[np.bool_]:
        """[L]: layers with any load. The others are dense, or were not recorded."""
        counted: NDArray[np.bool_] = self.load.sum(axis=1) > 0
        return counted

    @property
    def model_layers(self) -> ModelLayers | None:
        """The layers that the source names; else, where some of the L have no load, the others among all L."""
        if self.layers is not None or self.counted.all():
            return self.layers
        return ModelLayers(moe=tuple(np.flatnonzero(self.counted).tolist()), num_hidden=len(self.load))


def check_counts(placement: Placement, topology: Topology, counts: Counts) -> None:
    """Raises TraceError or TopologyError where the three are not of one model and one cluster."""
    if (placement.num_layers, placement.num_experts) != counts.load.shape:
        raise TraceError(
            f"the counts are of another model: they have {counts.load.shape[0]} layers x {counts.load.shape[1]} "
            f"experts, the placement {placement.num_layers} x {placement.num_experts}"
        )
    if placement.num_ranks != topology.num_ranks:
        raise TopologyError(
            f"topology '{topology.name}' has {topology.num_ranks} ranks, the placement {placement.num_ranks}"
        )


def score_counts(placement: Placement, topology: Topology, counts: Counts) -> dict[str, float]:
    """Load max/mean over ranks and over nodes (per rank of a node), averaged over the counted layers.

    An expert's load is shared by its holders' weights. Raises as `check_counts`.
    """
    check_counts(placement, topology, counts)
    of_rank = load_per_rank(placement, counts.load)[counts.counted]
    node_of_rank = topology.node_of_rank()
    of_node = np.stack([of_rank[:, node_of_rank == node].mean(axis=1) for node in range(topology.num_nodes)], axis=1)
    return {"load_max_over_mean": max_over_mean(of_rank), "node_load_max_over_mean": max_over_mean(of_node)}


def plan_counts(counts: Counts, topology: Topology, *, rows_per_rank: int, current: Placement | None = None) -> Plan:
    """The best balance over ranks, and ranks dealt to nodes so that copies of an expert lie on different nodes.

    Layers without load keep the linear placement. With a current placement of the same shape, names of nodes and ranks
    are matched to it. measured: the balance `before` (the current placement, linear unless given), of `eplb` and
    `after`, on the very counts that were fitted; `says`: that affinity is unknown.

    Raises PlacementError where the slots cannot hold the experts, TraceError where the current one is of another model.
    """
    shape = (topology.num_ranks, rows_per_rank)
    num_layers, num_experts = counts.load.shape
    linear = linear_placement(num_layers, num_experts, *shape)
    before = linear if current is None else current
    check_counts(before, topology, counts)
    table = linear.physical_to_logical.copy()
    balanced = balance_placement(counts.load, *shape, enough=LEVEL_ENOUGH).physical_to_logical
    for layer in np.flatnonzero(counts.counted):
        rows = balanced[layer].reshape(shape)
        table[layer] = rows[ranks_to_nodes(rows, counts.load[layer], topology.node_of_rank())].reshape(-1)
    draft = Placement(epoch=0, num_ranks=shape[0], num_experts=num_experts, physical_to_logical=table)
    placements = {
        "before": before,
        "eplb": eplb_placement(counts.load, *shape),
        "after": draft if current is None else match_labels(draft, current, topology),
    }
    measured: dict[str, Any] = {name: score_counts(one, topology, counts) for name, one in placements.items()}
    measured["counts"] = {
        "source": counts.source,
        "total": float(counts.load.sum()),
        "layers": int(counts.counted.sum()),
        "layers_without_load": int((~counts.counted).sum()),
    }
    measured["says"] = AFFINITY_UNKNOWN
    return Plan(placement=placements["after"], topology=topology, measured=measured)


def ranks_to_nodes(
    rows: NDArray[np.int32], load: NDArray[np.float64], node_of_rank: NDArray[np.int32]
) -> NDArray[np.int64]:
    """source [R]: whose rows [R, rows] of one layer each rank takes; which ranks share a node is free in a balance.

    Heaviest first, a rank goes to the node with room that holds least of its load already, then to the least loaded
    for its size: so copies spread over nodes, more tokens find one at home, and nodes are level too.
    """
    own = [row[row != EMPTY] for row in rows]
    copies = np.bincount(np.concatenate(own), minlength=len(load))
    per_copy = load / np.maximum(1, copies)
    weight = np.array([per_copy[experts].sum() for experts in own])
    size = np.bincount(node_of_rank)
    held = np.zeros((len(size), len(load)), bool)
    carried, room = np.zeros(len(size)), size.copy()
    members: list[list[int]] = [[] for _ in size]
    for rank in np.argsort(-weight, kind="stable"):
        twice = held[:, own[rank]] @ per_copy[own[rank]]
        node = int(np.lexsort((carried / size, twice, room == 0))[0])
        held[node, own[rank]] = True
        carried[node] += weight[rank]
        room[node] -= 1
        members[node].append(int(rank))
    source: NDArray[np.int64] = np.array([rank for ranks in members for rank in ranks], np.int64)
    return source
