"""The whole planner: invariants for every shape, and gains on traffic that it was not fitted on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.core import EMPTY, Placement
from placement.errors import PlacementError, TraceError
from placement.homes import telling_layers
from placement.plan import make_plan, plan_placement
from placement.planfile import plan_from_json, plan_to_json
from placement.topology import load_topology
from tests.placement.planner_cases import make_trace, shapes, shared_trace


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_capacity_is_exact_and_every_expert_is_somewhere_once_a_rank(case: tuple) -> None:
    trace, topology, rows, seed = case
    placement = plan_placement(trace, topology, rows_per_rank=rows, seed=seed)
    assert placement.physical_to_logical.shape == (trace.num_layers, topology.num_ranks * rows)
    copies = placement.copies_per_rank()
    assert copies.max() == 1
    assert (copies.sum(axis=1) > 0).all()
    if topology.num_ranks * rows == trace.num_experts:
        assert (placement.physical_to_logical != EMPTY).all()


def test_the_same_seed_gives_the_same_plan() -> None:
    trace, topology = make_trace(), load_topology("2x2")
    first, second = (plan_placement(trace, topology, rows_per_rank=3, seed=5) for _ in range(2))
    assert (first.physical_to_logical == second.physical_to_logical).all()


def test_spare_slots_are_used_where_experts_are_missing() -> None:
    placement = plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=4)
    assert (placement.physical_to_logical != EMPTY).all()


def test_rows_for_every_expert_put_all_experts_on_every_rank() -> None:
    placement = plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=8)
    assert (placement.copies_per_rank() == 1).all()


def test_experts_that_were_never_chosen_are_placed_too() -> None:
    trace = make_trace(num_experts=8)
    seldom = trace.select((trace.experts < 5).all(axis=(1, 2)))
    placement = plan_placement(seldom, load_topology("2x2"), rows_per_rank=2)
    assert (placement.copies_per_rank().sum(axis=1) == 1).all()


def test_too_few_slots_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(PlacementError, match=r"4 ranks x 1 slots per rank = 4 slots .* 8 experts"):
        plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=1)


def test_more_rows_than_experts_are_refused() -> None:
    with pytest.raises(PlacementError, match="at most 8"):
        plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=9)


def test_a_current_placement_of_another_model_is_refused() -> None:
    other = plan_placement(make_trace(num_experts=12), load_topology("2x2"), rows_per_rank=3)
    with pytest.raises(TraceError, match="another model"):
        plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=3, current=other)


def test_the_plan_made_again_from_itself_moves_nothing() -> None:
    trace, topology = make_trace(), load_topology("2x2")
    first = plan_placement(trace, topology, rows_per_rank=2)
    shuffled = first.physical_to_logical.reshape(2, 4, 2)[:, [3, 2, 0, 1]].reshape(2, -1)
    current = Placement(epoch=6, num_ranks=4, num_experts=8, physical_to_logical=shuffled)
    again = plan_placement(trace, topology, rows_per_rank=2, current=current)
    assert (again.physical_to_logical == shuffled).all()
    assert again.epoch == 7


def test_a_large_model_is_placed_in_all_its_layers_though_its_draft_sees_a_part_of_them() -> None:
    trace, topology = make_trace(num_tokens=60, num_layers=11, num_experts=500), load_topology("2x2")
    assert telling_layers(trace).step == 2
    placement = plan_placement(trace, topology, rows_per_rank=130, effort=0.01)
    assert placement.num_layers == 11
    assert (placement.copies_per_rank().sum(axis=1) > 0).all()


def test_kinds_of_requests_get_nodes_of_their_own() -> None:
    trace = make_trace(num_tokens=8000, num_experts=16, top_k=3, num_requests=80, num_kinds=4, seed=1)
    plan = make_plan(trace, load_topology("4x1"), rows_per_rank=4)
    after, before = plan.measured["after"], plan.measured["before"]
    assert after["nodes_visited"] < 0.9 * before["nodes_visited"]
    assert plan.measured["after_routed_homes"]["nodes_visited"] < 0.6 * before["nodes_visited"]


def test_a_plan_says_what_it_was_fitted_and_judged_on_and_survives_its_file(tmp_path: Path) -> None:
    trace = make_trace()
    plan = make_plan(trace, load_topology("2x2"), rows_per_rank=3)
    fit, held_out = trace.split_by_request()
    assert plan.measured["fit"] == {"tokens": fit.num_tokens, "requests": fit.num_requests}
    assert plan.measured["held_out"] == {"tokens": held_out.num_tokens, "requests": held_out.num_requests}
    read = plan_from_json(plan_to_json(plan), source="memory")
    assert read.measured == json.loads(json.dumps(plan.measured))
    assert np.array_equal(read.placement.physical_to_logical, plan.placement.physical_to_logical)
    assert np.array_equal(read.placement.rank_weights, plan.placement.rank_weights)


def test_one_request_alone_cannot_be_judged() -> None:
    with pytest.raises(TraceError, match="one request"):
        make_plan(make_trace(num_requests=1), load_topology("2x2"), rows_per_rank=2)


def test_ranks_with_unlike_numbers_of_slots_get_no_more_than_they_have() -> None:
    trace, topology = make_trace(), load_topology("2x2")
    placement = plan_placement(trace, topology, rows_per_rank=[4, 3, 2, 1])
    rows = placement.physical_to_logical.reshape(trace.num_layers, 4, 4)
    for rank, most in enumerate([4, 3, 2, 1]):
        assert (rows[:, rank, most:] == EMPTY).all()
        assert (rows[:, rank, :most] != EMPTY).all()


def test_unlike_ranks_keep_their_own_numbers_of_slots_when_planned_again() -> None:
    trace, topology = make_trace(), load_topology("2x2")
    first = plan_placement(trace, topology, rows_per_rank=[1, 4, 3, 2])
    again = plan_placement(make_trace(seed=9), topology, rows_per_rank=[1, 4, 3, 2], current=first)
    filled = (again.physical_to_logical.reshape(trace.num_layers, 4, 4) != EMPTY).sum(axis=2)
    assert (filled == [1, 4, 3, 2]).all()


def test_unlike_numbers_of_slots_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"4 numbers from 1 up, got \[4, 4\]"):
        plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=[4, 4])
    with pytest.raises(PlacementError, match="7 slots on 4 ranks hold no 8 experts"):
        plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=[4, 1, 1, 1])


@given(shapes(), st.sampled_from([2, 3, 4]))
@settings(max_examples=30, deadline=None)
def test_groups_kept_together_lie_whole_on_a_node(case: tuple, num_groups: int) -> None:
    trace, topology, rows, seed = case
    try:
        placement = plan_placement(trace, topology, rows_per_rank=rows, seed=seed, keep_groups=num_groups, effort=0.1)
    except PlacementError as error:
        assert "groups" in str(error)
        return
    width = trace.num_experts // num_groups
    for layer in placement.copies_per_rank():
        for node in range(topology.num_nodes):
            held = layer[topology.node_of_rank() == node].sum(axis=0) > 0
            parts = held.reshape(num_groups, width).sum(axis=1)
            assert set(parts.tolist()) <= {0, width}


def test_groups_that_do_not_divide_the_experts_or_fit_the_nodes_are_refused() -> None:
    with pytest.raises(PlacementError, match="8 experts do not divide into 3 groups"):
        plan_placement(make_trace(), load_topology("2x2"), rows_per_rank=2, keep_groups=3)
    with pytest.raises(PlacementError, match=r"2 groups of 4 experts do not fit whole on 4 nodes"):
        plan_placement(make_trace(), load_topology("4x1"), rows_per_rank=2, keep_groups=2)


@pytest.mark.long
def test_gpt_oss_on_four_nodes_visits_far_fewer_nodes_than_under_eplb() -> None:
    plan = make_plan(shared_trace("gpt-oss-20b"), load_topology("4x2"), rows_per_rank=4)
    after, eplb = plan.measured["after"], plan.measured["eplb"]
    assert after["nodes_visited"] <= 0.85 * eplb["nodes_visited"]
    assert after["load_max_over_mean"] <= eplb["load_max_over_mean"] + 0.02
