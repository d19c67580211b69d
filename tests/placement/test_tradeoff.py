"""The point of the curve that is fastest on the hardware at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.costs import ModelSizes
from placement.errors import TraceError
from placement.plan import plan_placement
from placement.topology import Link, load_topology
from placement.tradeoff import Load, Point, fastest, make_fastest_plan, points_of_curve
from tests.placement.planner_cases import make_trace

TRACE = make_trace(num_tokens=4000, num_experts=16, top_k=3, num_requests=40, num_kinds=4, seed=1)
CLUSTER = load_topology("4x2")
LOAD = Load(sizes=ModelSizes(token_bytes=8192, expert_bytes=1e7, pair_flops=1e8), batches=(256,))


def point(price: float, step: float) -> Point:
    return Point(balance_price=price, nodes_visited=1.0, load_max_over_mean=1.0, step_over_usual=step)


def test_a_price_must_be_clearly_faster_to_be_taken() -> None:
    assert fastest([point(0.4, 0.997), point(1.0, 1.0), point(2.5, 1.1)]) == 1.0
    assert fastest([point(0.4, 1.2), point(1.0, 1.0), point(2.5, 0.9)]) == 2.5


def test_the_curve_goes_from_fewest_hops_to_best_balance() -> None:
    points = points_of_curve(TRACE, CLUSTER, LOAD, rows_per_rank=2)
    assert [one.balance_price for one in points] == [0.4, 1.0, 2.5]
    assert points[0].nodes_visited <= points[2].nodes_visited
    assert points[1].step_over_usual == 1.0


def test_a_network_that_costs_nothing_never_asks_for_fewer_hops_than_a_slow_one() -> None:
    def on(bandwidth: float) -> float:
        links = (Link(bandwidth=bandwidth, latency_s=0.0), CLUSTER.links[1])
        cluster = replace(CLUSTER, links=links)
        heavy = replace(LOAD, sizes=replace(LOAD.sizes, pair_flops=1e12 if bandwidth > 1e12 else 1.0))
        return fastest(points_of_curve(TRACE, cluster, heavy, rows_per_rank=2))

    assert on(1e15) >= on(1e8)


def test_the_plan_tells_what_was_tried_and_the_gate_weighs_its_moves() -> None:
    current = plan_placement(TRACE, CLUSTER, rows_per_rank=2, effort=0.0, seed=3)
    plan = make_fastest_plan(TRACE, CLUSTER, LOAD, rows_per_rank=2, current=current)
    assert len(plan.measured["tradeoff"]["points"]) == 3
    assert plan.measured["gate"]["reason"]
    assert plan.placement.epoch == 1


def test_too_few_requests_to_part_thrice_are_refused() -> None:
    with pytest.raises(TraceError, match=r"leave out --model"):
        make_fastest_plan(make_trace(num_requests=2), CLUSTER, LOAD, rows_per_rank=2)
