"""Small instances against the exact optimum, found by trying every placement."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from placement.core import Placement
from placement.evaluate import Score, evaluate
from placement.plan import plan_placement
from placement.topology import Topology, load_topology
from placement.trace import RoutingTrace
from tests.placement.planner_cases import make_trace

WITHIN = 1.08


def every_table(num_experts: int, width: int, num_ranks: int, missing: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of width experts for each rank that leaves none of the missing ones out."""
    if num_ranks == 0:
        yield ()
        return
    for row in combinations(range(num_experts), width):
        left = missing.difference(row)
        if len(left) <= width * (num_ranks - 1):
            for more in every_table(num_experts, width, num_ranks - 1, left):
                yield row + more


def score(table: NDArray[np.int32], topology: Topology, trace: RoutingTrace) -> Score:
    """Homes go round over the ranks, token by token."""
    placement = Placement(
        epoch=0, num_ranks=topology.num_ranks, num_experts=trace.num_experts, physical_to_logical=table
    )
    return evaluate(placement, topology, trace, (np.arange(trace.num_tokens) % topology.num_ranks).astype(np.int32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fanout", "num_experts", "width", "top_k", "num_placements"),
    [
        ("3x1", 6, 2, 2, 90),
        ("2x2", 8, 2, 3, 2520),
        ("2x1", 6, 4, 2, 90),
        ("3x1", 5, 2, 2, 180),
    ],
)
def test_the_plan_is_within_8_percent_of_the_fewest_visits_of_any_placement(
    fanout: str, num_experts: int, width: int, top_k: int, num_placements: int, seed: int
) -> None:
    topology = load_topology(fanout)
    trace = make_trace(1200, 1, num_experts, top_k, num_requests=30, num_kinds=3, seed=seed)
    found = score(plan_placement(trace, topology, rows_per_rank=width, seed=seed).physical_to_logical, topology, trace)
    everyone = [
        score(np.array([table], np.int32), topology, trace)
        for table in every_table(num_experts, width, topology.num_ranks, frozenset(range(num_experts)))
    ]
    assert len(everyone) == num_placements
    assert found.nodes_visited <= WITHIN * min(one.nodes_visited for one in everyone)
