"""Between fewest hops and best balance: the point of the curve where this hardware is fastest with this model.

A plan's one free choice is what load max/mean is worth against visits. Quick drafts at several prices are judged by the
modelled step time on requests that they were not fitted on, and the plan is made at the price that won.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from placement.core import Placement
from placement.costs import ModelSizes, step_time
from placement.errors import TraceError
from placement.evaluate import evaluate
from placement.gate import weigh
from placement.homes import homes_of, homes_per_token, route_homes
from placement.plan import HOME_PREFIX, make_plan, plan_placement
from placement.planfile import Plan
from placement.replan import num_copies_between
from placement.topology import Topology
from placement.trace import RoutingTrace

PRICES = (0.4, 1.0, 2.5)
DRAFT_EFFORT = 0.25
CLEARLY = 0.995


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the cluster serves: the model's sizes, and the tokens of a decode step and of a prefill step."""

    sizes: ModelSizes
    batches: tuple[int, ...] = (512, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One draft: visits and load on requests not fitted on; its step over that at price 1, mean over the batches."""

    balance_price: float
    nodes_visited: float
    load_max_over_mean: float
    step_over_usual: float


def points_of_curve(
    trace: RoutingTrace, topology: Topology, load: Load, *, rows_per_rank: int | Sequence[int], seed: int = 0
) -> list[Point]:
    """Drafts at all prices, fitted on every second request and judged on the others, homes routed."""
    every_second = np.isin(trace.request, np.unique(trace.request)[::2])
    fit, judged = trace.select(every_second), trace.select(~every_second)
    steps, scores = {}, {}
    for price in PRICES:
        draft = plan_placement(
            fit, topology, rows_per_rank=rows_per_rank, seed=seed, effort=DRAFT_EFFORT, balance_price=price
        )
        requests, ranks = route_homes(draft, topology, judged, HOME_PREFIX)
        homes = homes_per_token(judged.request, requests, ranks)
        scores[price] = evaluate(draft, topology, judged, homes)
        steps[price] = [step_time(draft, topology, judged, homes, load.sizes, batch).mean_s for batch in load.batches]
    return [
        Point(
            balance_price=price,
            nodes_visited=scores[price].nodes_visited,
            load_max_over_mean=scores[price].load_max_over_mean,
            step_over_usual=sum(mine / usual for mine, usual in zip(steps[price], steps[1.0], strict=True))
            / len(load.batches),
        )
        for price in PRICES
    ]


def fastest(points: Sequence[Point]) -> float:
    """The price of the fastest point; another than 1 only where it is faster by more than half a percent."""
    best = min(points, key=lambda point: point.step_over_usual)
    return best.balance_price if best.step_over_usual < CLEARLY else 1.0


def make_fastest_plan(
    trace: RoutingTrace,
    topology: Topology,
    load: Load,
    *,
    rows_per_rank: int | Sequence[int],
    current: Placement | None = None,
    seed: int = 0,
    keep_groups: int = 0,
    horizon_s: float = 3600.0,
) -> Plan:
    """As `make_plan`, at the point of the curve that is fastest; measured also has `tradeoff` and `gate`.

    tradeoff: the price chosen and the points tried. gate, with a current placement: whether horizon_s seconds of steps
    of the first batch pay for the moves, which take a tenth of the nodes' links. Raises as `make_plan`, and TraceError
    for fewer than four requests.
    """
    fit, held_out = trace.split_by_request()
    if fit.num_requests < 2:
        raise TraceError(
            f"the trace has {trace.num_requests} requests; the fastest point takes 4 or more (leave out --model)"
        )
    points = points_of_curve(fit, topology, load, rows_per_rank=rows_per_rank, seed=seed)
    price = fastest(points)
    plan = make_plan(
        trace,
        topology,
        rows_per_rank=rows_per_rank,
        current=current,
        seed=seed,
        balance_price=price,
        keep_groups=keep_groups,
    )
    measured: dict[str, Any] = plan.measured | {
        "tradeoff": {"balance_price": price, "points": [asdict(point) for point in points]}
    }
    if current is not None:
        homes = homes_of(held_out, topology.num_ranks, seed)
        before, after = (
            step_time(placement, topology, held_out, homes, load.sizes, load.batches[0]).mean_s
            for placement in (current, plan.placement)
        )
        link = topology.links[topology.node_level]
        measured["gate"] = weigh(
            step_before_s=before,
            step_after_s=after,
            steps_in_horizon=horizon_s / before,
            num_copies=num_copies_between(current, plan.placement),
            expert_bytes=load.sizes.expert_bytes,
            copy_bandwidth=0.1 * link.bandwidth * topology.num_nodes,
            slowdown=0.1,
        ).to_dict()
    return replace(plan, measured=measured)
