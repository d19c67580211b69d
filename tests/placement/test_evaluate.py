"""Scores by hand, the affinity graph, and every way in which arguments may not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.baselines import linear_placement, random_placement
from placement.core import Placement
from placement.errors import PlacementError, TopologyError, TraceError
from placement.evaluate import evaluate, max_over_mean
from placement.graph import build_graph
from placement.topology import load_topology
from placement.trace import RoutingTrace
from tests.placement.planner_cases import make_trace


def two_tokens() -> RoutingTrace:
    """One layer, 4 experts: the first token chooses 0 and 1, the second 1 and 3."""
    return RoutingTrace(
        num_experts=4,
        experts=np.array([[[0, 1]], [[1, 3]]], np.uint8),
        request=np.array([0, 1]),
        position=np.zeros(2, np.int32),
        step=np.zeros(2, np.int64),
        source_rank=np.full(2, -1, np.int32),
        phase=np.zeros(2, np.uint8),
    )


def test_a_score_by_hand() -> None:
    placement = linear_placement(1, 4, 4, 1)
    score = evaluate(placement, load_topology("2x2"), two_tokens(), np.array([0, 0], np.int32))
    assert score.nodes_visited == 0.5
    assert score.ranks_visited == 1.5
    assert score.load_max_over_mean == 2.0
    assert score.node_load_max_over_mean == 1.5
    assert (score.num_tokens, score.num_requests) == (2, 2)
    assert set(score.to_dict()) >= {"nodes_visited", "step_load_max_over_mean"}


def test_a_replica_at_home_saves_the_visit() -> None:
    table = np.array([[0, 1, 1, 2, 2, 3, 3, 0]], np.int32)
    placement = Placement(epoch=0, num_ranks=4, num_experts=4, physical_to_logical=table)
    score = evaluate(placement, load_topology("2x2"), two_tokens(), np.array([0, 3], np.int32))
    assert (score.nodes_visited, score.ranks_visited) == (0.5, 0.5)


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    trace, homes = two_tokens(), np.zeros(2, np.int32)
    with pytest.raises(TopologyError, match="has 8 ranks, the placement 4"):
        evaluate(linear_placement(1, 4, 4, 1), load_topology("4x2"), trace, homes)
    with pytest.raises(TraceError, match="1 layers x 4 experts, the placement 2 x 8"):
        evaluate(linear_placement(2, 8, 4, 2), load_topology("2x2"), trace, homes)
    with pytest.raises(PlacementError, match="home is rank 7"):
        evaluate(linear_placement(1, 4, 4, 1), load_topology("2x2"), trace, np.array([0, 7], np.int32))


def test_balancedness_of_the_peers_example() -> None:
    assert 1 / max_over_mean(np.array([[100, 0, 0, 0]] * 2)) == 0.25
    assert max_over_mean(np.zeros((2, 3))) == 1.0


def test_the_graph_counts_like_plain_loops() -> None:
    trace = make_trace(num_tokens=50, num_layers=3, num_experts=6, top_k=3)
    graph = build_graph(trace, source=trace.request, num_sources=10)
    load, pairs, steps = np.zeros((3, 6)), np.zeros((3, 6, 6)), np.zeros((2, 6, 6))
    for token in trace.experts:
        for layer, chosen in enumerate(token):
            for one in chosen:
                load[layer, one] += 1
                for two in chosen:
                    pairs[layer, one, two] += one != two
                for after in token[layer + 1] if layer < 2 else ():
                    steps[layer, one, after] += 1
    assert (graph.load == load).all()
    assert (graph.coactivation == pairs).all()
    assert (graph.transition == steps).all()
    assert (graph.demand.sum(axis=0) == load).all()


def test_the_networkx_view_has_loads_and_no_zero_edges() -> None:
    trace = two_tokens()
    view = build_graph(trace).to_networkx(0)
    assert view.nodes[1]["load"] == 2
    assert view.edges[0, 1]["weight"] == 1
    assert not view.has_edge(0, 3)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_baselines_are_valid_for_every_shape(num_ranks: int, num_experts: int, spare: int) -> None:
    rows = min(num_experts, -(-num_experts // num_ranks) + spare)
    for placement in (
        linear_placement(2, num_experts, num_ranks, rows),
        random_placement(2, num_experts, num_ranks, rows, seed=spare),
    ):
        assert placement.rows_per_rank == rows
