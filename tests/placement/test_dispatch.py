"""The replica choice: fewest units, fair among equals; against a plain reference."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from placement.dispatch import choose_ranks


def holds_from(rows: list[list[int]], num_experts: int) -> NDArray[np.uint8]:
    holds = np.zeros((len(rows), num_experts), np.uint8)
    for rank, experts in enumerate(rows):
        holds[rank, experts] = 1
    return holds


def fewest_nodes(chosen: list[int], home_node: int, holds: NDArray[np.uint8], nodes: NDArray[np.int32]) -> int:
    """By trying all: the least number of nodes beside home's that serve every expert."""
    nodes_of = [{int(nodes[rank]) for rank in np.flatnonzero(holds[:, expert])} for expert in chosen]
    for number in range(len(chosen) + 1):
        for visited in combinations(sorted(set(nodes.tolist()) - {home_node}), number):
            if all(found & {home_node, *visited} for found in nodes_of):
                return number
    raise AssertionError("an expert has no holder")


@st.composite
def clusters(draw: st.DrawFn) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    num_nodes, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts, top_k = draw(st.integers(2, 12)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_ranks = num_nodes * width
    holds = (rng.random((num_ranks, num_experts)) < draw(st.floats(0, 0.7))).astype(np.uint8)
    holds[rng.integers(0, num_ranks, num_experts), np.arange(num_experts)] = 1
    experts = np.argsort(rng.random((8, num_experts)), axis=1)[:, : min(top_k, num_experts)].astype(np.int32)
    home = rng.integers(0, num_ranks, 8).astype(np.int32)
    return experts, home, holds, np.repeat(np.arange(num_nodes, dtype=np.int32), width)


@given(clusters())
@settings(max_examples=150, deadline=None)
def test_every_expert_is_served_by_a_holder_on_the_fewest_nodes_beside_home(case: tuple) -> None:
    experts, home, holds, nodes = case
    ranks = choose_ranks(experts, home, holds, nodes)
    for token, chosen in enumerate(experts):
        home_node = int(nodes[home[token]])
        for expert, rank in zip(chosen, ranks[token], strict=True):
            assert holds[rank, expert]
        if all(holds[home[token], expert] for expert in chosen):
            assert (ranks[token] == home[token]).all()
        visited = {int(nodes[rank]) for rank in ranks[token]} - {home_node}
        best = fewest_nodes(chosen.tolist(), home_node, holds, nodes)
        assert len(visited) == best or (best >= 3 and len(visited) <= best + 1)


def test_an_expert_of_minus_one_goes_nowhere() -> None:
    ranks = choose_ranks(
        np.array([[1, -1]]), np.array([0], np.int32), holds_from([[0], [1]], 2), np.array([0, 1], np.int32)
    )
    assert ranks.tolist() == [[1, -1]]


def test_one_node_that_has_both_experts_is_taken_before_two_that_have_one_each() -> None:
    holds = holds_from([[0], [1, 4], [2, 5], [1, 2]], 6)
    ranks = choose_ranks(np.array([[1, 2]]), np.array([0], np.int32), holds, np.arange(4, dtype=np.int32))
    assert ranks.tolist() == [[3, 3]]


def test_a_pair_of_nodes_is_found_where_greedy_would_take_three() -> None:
    holds = holds_from([[6], [0, 1, 2], [3, 4, 5], [0, 1, 3, 4], [2], [5]], 7)
    nodes = np.arange(6, dtype=np.int32)
    ranks = choose_ranks(np.array([[0, 1, 2, 3, 4, 5]]), np.array([0], np.int32), holds, nodes)
    assert set(ranks[0].tolist()) == {1, 2}


def test_a_rank_that_serves_already_is_preferred_inside_a_node() -> None:
    holds = holds_from([[0], [1, 2], [2]], 3)
    nodes = np.array([0, 1, 1], np.int32)
    for home_expert in range(3):
        ranks = choose_ranks(np.array([[1, 2, home_expert]]), np.array([0], np.int32), holds, nodes)
        assert ranks[0, :2].tolist() == [1, 1]


def test_equal_replicas_share_the_tokens_fairly() -> None:
    rng = np.random.default_rng(0)
    num_ranks, num_experts = 8, 16
    experts = np.argsort(rng.random((20_000, num_experts)), axis=1)[:, :2].astype(np.int32)
    home = rng.integers(0, num_ranks, len(experts)).astype(np.int32)
    holds = np.zeros((num_ranks, num_experts), np.uint8)
    for expert in range(num_experts):
        holds[[expert % 8, (expert + 3) % 8], expert] = 1
    load = np.bincount(choose_ranks(experts, home, holds, np.arange(8, dtype=np.int32)).ravel(), minlength=8)
    assert load.max() / load.mean() < 1.08


def test_holders_that_a_token_comes_by_anyway_share_it_by_their_weights() -> None:
    rng = np.random.default_rng(3)
    others = rng.integers(1, 400, (20_000, 1))
    experts = np.concatenate([np.zeros_like(others), others], axis=1)
    holds = np.zeros((2, 400), np.uint16)
    holds[0, 0], holds[1] = 3000, 1000
    ranks = choose_ranks(experts, np.zeros(len(experts), np.int32), holds, np.arange(2, dtype=np.int32))
    assert (ranks[:, 1] == 1).all()
    assert abs((ranks[:, 0] == 0).mean() - 0.75) < 0.03


def test_a_rank_that_must_be_visited_serves_in_place_of_one_that_need_not() -> None:
    holds = holds_from([[0], [1], [1, 2]], 3)
    ranks = choose_ranks(np.array([[1, 2]]), np.array([0], np.int32), holds, np.array([0, 0, 1], np.int32))
    assert ranks.tolist() == [[2, 2]]


def test_the_choice_does_not_depend_on_the_other_tokens_of_the_batch() -> None:
    rng = np.random.default_rng(1)
    experts = np.argsort(rng.random((50, 8)), axis=1)[:, :3].astype(np.int32)
    home = rng.integers(0, 4, 50).astype(np.int32)
    holds = (rng.random((4, 8)) < 0.6).astype(np.uint8)
    holds[np.arange(8) % 4, np.arange(8)] = 1
    nodes = np.array([0, 0, 1, 1], np.int32)
    together = choose_ranks(experts, home, holds, nodes)
    for token in range(50):
        alone = choose_ranks(experts[token : token + 1], home[token : token + 1], holds, nodes)
        assert (alone[0] == together[token]).all()
