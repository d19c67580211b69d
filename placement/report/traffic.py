"""Where a trace's tokens go under a placement: the load of each rank, the visits at each level of the topology."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
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
    """

    load: NDArray[np.float64]
    arrivals: tuple[NDArray[np.float64], ...]

    def visited(self, level: int) -> float:
        """Other groups of a level that a token visits, per layer."""
        return float(self.arrivals[level].sum())


def count_traffic(placement: Placement, topology: Topology, trace: RoutingTrace) -> Traffic:
    """Serve the trace from its recorded homes, or random ones. Raises as `check_fit` and `homes_of`."""
    check_fit(placement, topology, trace)
    homes = homes_of(trace, topology.num_ranks)
    holds = placement.copies_per_rank()
    load = np.zeros(topology.num_ranks)
    arrivals = tuple(np.zeros(int(groups[-1]) + 1) for groups in topology.groups)
    for layer in range(trace.num_layers):
        # Groups are numbered in rank order: once ranks are sorted, a group's visits stand side by side at every level.
        served = np.sort(choose_ranks(trace.experts[:, layer], homes, holds[layer], topology.node_of_rank()), axis=1)
        load += np.bincount(served.ravel(), minlength=len(load))
        for groups, arrived in zip(topology.groups, arrivals, strict=True):
            visited = groups[served]
            first = visited != groups[homes][:, None]
            first[:, 1:] &= visited[:, 1:] != visited[:, :-1]
            arrived += np.bincount(visited[first], minlength=len(arrived))
    per_token = 1 / (trace.num_tokens * trace.num_layers)
    return Traffic(load=load / load.mean(), arrivals=tuple(arrived * per_token for arrived in arrivals))
