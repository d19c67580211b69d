"""Where a trace's tokens go under a placement: the load of each rank, the visits at each level of the topology."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.counts import Counts
from placement.dispatch import choose_ranks
from placement.evaluate import check_fit
from placement.homes import homes_of
from placement.topology import Topology
from placement.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """load [R]: pairs of token and expert served, over the mean of the ranks, all layers together.

    arrivals: for each level of the topology [groups of the level], the visits per token and layer to each group from
    tokens whose home lies in another. Their sum is the number of other groups that a token visits.
    vectors [levels]: hidden states per token and layer that cross the links of a level on their way out: one for each
    other node, and inside a node one for each further group. nodes_by_layer [L]: other nodes visited in each layer by
    the judged tokens. From counts alone only load is known, and the others are empty.
    """

    load: NDArray[np.float64]
    arrivals: tuple[NDArray[np.float64], ...]
    vectors: NDArray[np.float64]
    nodes_by_layer: NDArray[np.float64]

    def visited(self, level: int) -> float:
        """Other groups of a level that a token visits, per layer."""
        return float(self.arrivals[level].sum())

    def bytes_per_token(self, level: int, token_bytes: float) -> float:
        """Out and back, all layers. token_bytes: one hidden state as it is sent."""
        return float(2 * len(self.nodes_by_layer) * self.vectors[level] * token_bytes)


def count_traffic(
    placement: Placement, topology: Topology, trace: RoutingTrace, judged: NDArray[np.bool_] | None = None
) -> Traffic:
    """Serve the trace from its recorded homes, or random ones. Raises as `check_fit` and `homes_of`.

    judged [T]: the tokens that nodes_by_layer counts, all unless given.
    """
    check_fit(placement, topology, trace)
    homes = homes_of(trace, topology.num_ranks)
    holds = placement.weights_per_rank()
    load = np.zeros(topology.num_ranks)
    arrivals = tuple(np.zeros(int(groups[-1]) + 1) for groups in topology.groups)
    crossed = np.zeros(len(topology.levels))
    nodes_by_layer = np.zeros(trace.num_layers)
    counted = np.ones(trace.num_tokens, bool) if judged is None else judged
    for layer in range(trace.num_layers):
        # Groups are numbered in rank order: once ranks are sorted, a group's visits stand side by side at every level.
        served = np.sort(choose_ranks(trace.experts[:, layer], homes, holds[layer], topology.node_of_rank()), axis=1)
        load += np.bincount(served.ravel(), minlength=len(load))
        firsts = [_first_visits(groups, served, homes) for groups in topology.groups]
        for groups, first, arrived in zip(topology.groups, firsts, arrivals, strict=True):
            arrived += np.bincount(groups[served][first], minlength=len(arrived))
        to_node = firsts[topology.node_level]
        nodes_by_layer[layer] = to_node[counted].sum() / max(1, counted.sum())
        for level, groups in enumerate(topology.groups[: topology.node_level]):
            crossed[level] += (to_node & (groups[served] != groups[homes][:, None])).sum()
        crossed[topology.node_level] += to_node.sum()
        for level in range(topology.node_level + 1, len(crossed)):
            # A vector for another node arrives at one of its groups from outside, and goes on to the others inside.
            crossed[level] += firsts[level].sum() - to_node.sum()
    per_token = 1 / (trace.num_tokens * trace.num_layers)
    return Traffic(
        load=load / load.mean(),
        arrivals=tuple(arrived * per_token for arrived in arrivals),
        vectors=crossed * per_token,
        nodes_by_layer=nodes_by_layer,
    )


def spread_counts(placement: Placement, counts: Counts) -> Traffic:
    """The load of the ranks where the copies of an expert share its counts evenly."""
    copies = placement.copies_per_rank()
    per_copy = counts.load / copies.sum(axis=1, dtype=np.int64)
    load = (copies * per_copy[:, None, :]).sum(axis=(0, 2))
    return Traffic(load=load / load.mean(), arrivals=(), vectors=np.zeros(0), nodes_by_layer=np.zeros(0))


def _first_visits(groups: NDArray[np.int32], served: NDArray[np.int32], homes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[T, K]: whether a pair is its token's first in a group other than its home's. served: ranks [T, K], sorted."""
    visited = groups[served]
    first: NDArray[np.bool_] = visited != groups[homes][:, None]
    first[:, 1:] &= visited[:, 1:] != visited[:, :-1]
    return first
