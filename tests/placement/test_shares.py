"""Shares: weights that level the load at no visit more."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.core import Placement
from placement.evaluate import evaluate
from placement.plan import plan_placement
from placement.shares import level_shares, level_weights, load_per_rank
from placement.topology import load_topology
from tests.placement.planner_cases import make_trace, shapes


def placement_of(rows: list[list[int]], num_experts: int) -> Placement:
    return Placement(
        epoch=0, num_ranks=len(rows), num_experts=num_experts, physical_to_logical=np.array(rows).reshape(1, -1)
    )


def test_weights_move_load_from_the_heavy_holder_to_the_light_one() -> None:
    rows, load = np.array([[0, 1], [0, 2]]), np.array([60.0, 40.0, 10.0])
    weights = np.full(2, 1024, np.uint16)
    level_weights(rows, load, weights)
    placement = Placement(
        epoch=0,
        num_ranks=2,
        num_experts=3,
        physical_to_logical=rows.reshape(1, -1),
        rank_weights=weights.reshape(1, 2),
    )
    assert np.allclose(load_per_rank(placement, load.reshape(1, -1)), 55, rtol=0.02)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_level_weights_never_makes_the_heaviest_rank_heavier(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.array([rng.permutation(12)[:4] for _ in range(5)])
    rows[:3, 0] = -1
    load = rng.random(12) ** 3
    weights = np.full(5, 1024, np.uint16)
    even, held = weights.copy(), np.zeros((5, 12))
    level_weights(rows, load, weights)
    assert weights.min() >= 1
    for rank, row in enumerate(rows):
        held[rank, row[row >= 0]] = 1

    def heaviest(weight: np.ndarray) -> float:
        parts = held * weight[:, None].astype(float)
        return float((parts / np.maximum(parts.sum(axis=0), 1e-9) * load).sum(axis=1).max())

    assert heaviest(weights) <= heaviest(even) * (1 + 1e-9)


@given(shapes())
@settings(max_examples=20, deadline=None)
def test_shares_change_neither_the_places_nor_the_nodes_visited(case: tuple) -> None:
    trace, topology, rows, seed = case
    placement = plan_placement(trace, topology, rows_per_rank=rows, seed=seed, effort=0.1)
    even = Placement(
        epoch=0,
        num_ranks=placement.num_ranks,
        num_experts=placement.num_experts,
        physical_to_logical=placement.physical_to_logical,
    )
    homes = np.random.default_rng(seed).integers(0, topology.num_ranks, trace.num_tokens).astype(np.int32)
    shared = level_shares(even, topology, trace, homes, seed=seed)
    assert (shared.physical_to_logical == even.physical_to_logical).all()
    assert (
        evaluate(shared, topology, trace, homes).nodes_visited == evaluate(even, topology, trace, homes).nodes_visited
    )


def test_shares_level_a_placement_whose_copies_lie_where_tokens_go_anyway() -> None:
    trace, topology = make_trace(num_tokens=6000, num_experts=8, top_k=4, seed=2), load_topology("4x1")
    rows = placement_of([[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 5, 7], [0, 4, 2, 7]], 8).physical_to_logical
    placement = Placement(
        epoch=0, num_ranks=4, num_experts=8, physical_to_logical=np.repeat(rows, trace.num_layers, axis=0)
    )
    homes = np.random.default_rng(0).choice(4, trace.num_tokens, p=[0.55, 0.15, 0.15, 0.15]).astype(np.int32)
    shared = level_shares(placement, topology, trace, homes)
    before, after = (evaluate(one, topology, trace, homes) for one in (placement, shared))
    assert after.load_max_over_mean < before.load_max_over_mean - 0.01


def test_without_spare_slots_there_is_nothing_to_share() -> None:
    trace, topology = make_trace(), load_topology("2x2")
    placement = plan_placement(trace, topology, rows_per_rank=2)
    assert (placement.rank_weights == placement.rank_weights[0, 0]).all()
