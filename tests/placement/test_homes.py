"""Homes: random by request, recorded, or routed from the first tokens under a limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import TraceError
from placement.evaluate import evaluate
from placement.homes import (
    assign_under_limit,
    cluster_requests,
    first_tokens,
    homes_of,
    homes_per_token,
    random_homes,
    route_homes,
)
from placement.plan import plan_placement
from placement.topology import load_topology
from tests.placement.planner_cases import make_trace


def test_a_request_has_one_random_home_and_homes_are_spread() -> None:
    request = np.repeat(np.arange(2000), 3)
    homes = random_homes(request, 8, seed=1)
    assert (homes.reshape(-1, 3) == homes[::3, None]).all()
    assert np.bincount(homes, minlength=8).min() > 600


def test_recorded_homes_are_used_and_checked() -> None:
    trace = make_trace()
    recorded = replace(trace, source_rank=(trace.request % 3).astype(np.int32))
    assert (homes_of(recorded, 4) == recorded.source_rank).all()
    with pytest.raises(TraceError, match="names rank 2"):
        homes_of(recorded, 2)


def test_the_prefix_is_taken_in_position_order() -> None:
    trace = make_trace(num_tokens=50, num_requests=3)
    shuffled = trace.select(np.random.default_rng(0).permutation(50))
    chosen = shuffled.select(first_tokens(shuffled, 4))
    for request in np.unique(shuffled.request):
        mine = np.sort(shuffled.position[shuffled.request == request])[:4]
        assert np.sort(chosen.position[chosen.request == request]).tolist() == mine.tolist()


def test_routed_homes_save_hops_under_the_load_limit() -> None:
    trace, topology = make_trace(num_tokens=4000, num_requests=40), load_topology("2x2")
    placement = plan_placement(trace, topology, rows_per_rank=2)
    requests, ranks = route_homes(placement, topology, trace, 8)
    assert np.bincount(topology.node_of_rank()[ranks]).max() <= 20
    assert np.bincount(ranks, minlength=4).max() <= 10
    routed = evaluate(placement, topology, trace, homes_per_token(trace.request, requests, ranks))
    at_random = evaluate(placement, topology, trace, homes_of(trace, 4))
    assert routed.nodes_visited < at_random.nodes_visited


def test_what_comes_after_the_prefix_does_not_change_the_home() -> None:
    trace, topology = make_trace(num_tokens=600, num_requests=12), load_topology("2x2")
    placement = plan_placement(trace, topology, rows_per_rank=2)
    early = trace.select(first_tokens(trace, 5))
    whole, cut_off = route_homes(placement, topology, trace, 5), route_homes(placement, topology, early, 5)
    assert (whole[1] == cut_off[1]).all()


def test_a_prefix_below_one_is_refused() -> None:
    trace, topology = make_trace(), load_topology("2x2")
    placement = plan_placement(trace, topology, rows_per_rank=2)
    with pytest.raises(TraceError, match="prefix must be at least 1, got 0"):
        route_homes(placement, topology, trace, 0)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_no_unit_gets_more_owners_than_its_limit(num_owners: int, num_units: int, seed: int) -> None:
    value = np.random.default_rng(seed).random((num_owners, num_units))
    limit = np.full(num_units, -(-num_owners // num_units), np.float64)
    chosen = assign_under_limit(value, np.ones(num_owners), limit)
    assert (np.bincount(chosen, minlength=num_units) <= limit).all()


def test_requests_of_one_kind_are_clustered_together() -> None:
    trace = make_trace(num_tokens=4000, num_requests=40)
    cluster = cluster_requests(trace, np.array([0.5, 0.5]))
    kind = np.unique(trace.request) // 2 % 2
    agree = (cluster == kind).mean()
    assert max(agree, 1 - agree) > 0.9
