"""Homes one request at a time: from token ids, under a limit, sticky for a session."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from placement.errors import ConfigError, TraceError
from placement.evaluate import evaluate
from placement.homes import homes_of, homes_per_token
from placement.plan import plan_placement
from placement.routing import HomeRouting, build_token_table, idle_routing
from placement.topology import load_topology
from tests.placement.planner_cases import make_trace

CLUSTER = load_topology("2x2")


def test_token_ids_alone_find_the_node_where_the_experts_are() -> None:
    trace = make_trace(num_tokens=4000, num_requests=40)
    kind = trace.request // 2 % 2
    trace = replace(trace, token_id=(kind * 10 + trace.position % 10).astype(np.int32))
    placement = plan_placement(trace, CLUSTER, rows_per_rank=2)
    table = build_token_table(placement, CLUSTER, trace)
    routing, requests, ranks = idle_routing(CLUSTER, slack=1.3), np.unique(trace.request), []
    for request in requests:
        rank, routing = routing.choose(table.of_prompt(trace.token_id[trace.request == request][:8]))
        ranks.append(rank)
    homes = homes_per_token(trace.request, requests, np.array(ranks, np.int32))
    routed = evaluate(placement, CLUSTER, trace, homes).nodes_visited
    assert routed < 0.9 * evaluate(placement, CLUSTER, trace, homes_of(trace, 4)).nodes_visited
    assert max(routing.running) <= 13


def test_no_node_fills_beyond_its_share() -> None:
    routing = idle_routing(CLUSTER)
    for _ in range(40):
        _, routing = routing.choose(np.array([1.0, 0.0]))
    at_node = np.array(routing.running).reshape(2, 2).sum(axis=1)
    assert at_node.max() <= 21


def test_a_session_stays_where_it_is_whatever_its_next_prompt_says() -> None:
    first, routing = idle_routing(CLUSTER).choose(np.array([1.0, 0.0]), session="a")
    again, routing = routing.choose(np.array([0.0, 1.0]), session="a")
    assert first == again
    assert routing.finish(first).running[first] == 1


def test_unknown_ids_and_empty_prompts_are_worth_nothing_in_particular() -> None:
    trace = replace(make_trace(), token_id=np.zeros(400, np.int32))
    table = build_token_table(plan_placement(trace, CLUSTER, rows_per_rank=2), CLUSTER, trace)
    assert table.of_prompt(np.array([], np.int32)).tolist() == [0.0, 0.0]
    assert table.of_prompt(np.array([99, -1], np.int32)).tolist() == [0.0, 0.0]


def test_a_trace_without_token_ids_makes_no_table() -> None:
    trace = make_trace()
    with pytest.raises(TraceError, match="carries none"):
        build_token_table(plan_placement(trace, CLUSTER, rows_per_rank=2), CLUSTER, trace)


def test_a_routing_of_another_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 numbers"):
        HomeRouting(topology=CLUSTER, running=(0, 0), sessions={})
