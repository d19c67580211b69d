"""METIS with exact capacities, the tree it descends, and the lining up with homes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.descend import tree_of
from placement.partition import align, cut
from placement.replicas import fewest_copies, fill_spare, slots_of_parts
from placement.topology import Link, load_topology


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_part_holds_more_than_its_slots(num_experts: int, num_parts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(num_experts + int(rng.integers(0, 4)), np.full(num_parts, 1 / num_parts)).astype(np.int64)
    sizes[0] += max(0, num_experts - sizes.sum())
    ties = rng.integers(0, 50, (num_experts, num_experts)).astype(float)
    part = cut(rng.integers(0, 100, num_experts) * 1.0, ties + ties.T, sizes, np.full(num_parts, 1 / num_parts), 0)
    assert (np.bincount(part, minlength=num_parts) <= sizes).all()


def test_experts_used_together_are_cut_into_one_part() -> None:
    ties = np.kron(np.eye(2), np.full((4, 4), 100.0)) + 1
    np.fill_diagonal(ties, 0)
    part = cut(np.ones(8), ties, np.array([4, 4]), np.array([0.5, 0.5]), 0)
    assert len(set(part[:4].tolist())) == len(set(part[4:].tolist())) == 1


def test_parts_take_the_names_where_their_tokens_are_at_home() -> None:
    demand = np.array([[0.0, 0, 5, 5], [5, 5, 0, 0]])
    assert align(np.array([0, 0, 1, 1]), demand, np.array([2, 2])).tolist() == [1, 1, 0, 0]


def test_spare_slots_go_to_what_a_units_own_tokens_lack() -> None:
    slots = slots_of_parts(np.array([0, 0, 1, 1]), np.arange(4, dtype=np.int32), np.array([3, 3]))
    demand = np.array([[1.0, 1, 9, 2], [1, 8, 1, 1]])
    filled = fill_spare(slots, np.array([3, 3]), np.ones(4), np.zeros((4, 4)), demand, np.ones(4, np.int64))
    assert filled[0, 2] == 2
    assert filled[1, 2] == 1


def test_an_expert_hotter_than_a_ranks_fair_load_must_have_copies() -> None:
    load, experts = np.array([90.0, 30, 10, 10, 10, 10]), np.arange(6, dtype=np.int32)
    assert fewest_copies(load, experts, spare=4, most=4, fair=40.0).tolist() == [3, 1, 1, 1, 1, 1]
    assert fewest_copies(load, experts, spare=4, most=2, fair=40.0).tolist() == [2, 1, 1, 1, 1, 1]
    assert fewest_copies(load, experts, spare=1, most=4, fair=10.0).tolist() == [2, 1, 1, 1, 1, 1]


def test_copies_that_must_be_are_filled_in_before_those_that_save_visits() -> None:
    slots = slots_of_parts(np.array([0, 0, 1, 1]), np.arange(4, dtype=np.int32), np.array([3, 3]))
    demand = np.array([[1.0, 1, 9, 2], [1, 8, 1, 1]])
    filled = fill_spare(slots, np.array([3, 3]), np.ones(4), np.zeros((4, 4)), demand, np.array([2, 1, 1, 2]))
    assert filled[0, 2] == 3
    assert filled[1, 2] == 0


def test_levels_with_one_child_are_skipped_and_wide_ones_gathered() -> None:
    assert [len(child.ranks) for child in tree_of(load_topology("1x1x3")).children] == [1, 1, 1]
    wide = tree_of(load_topology("100x2"))
    assert len(wide.children) == 10
    assert wide.children[0].crosses_nodes
    assert wide.ranks == tuple(range(200))


def test_a_level_with_a_slower_link_has_dearer_visits() -> None:
    usual = load_topology("2x2x2")
    slow = replace(usual, links=(Link(bandwidth=15e9, latency_s=1e-5), *usual.links[1:]))
    assert tree_of(usual).visit_price == 1.0
    assert tree_of(slow).visit_price == pytest.approx(3.0)
    node = tree_of(slow).children[0]
    assert (node.visit_price, node.crosses_nodes) == (1.0, True)
    assert node.children[0].visit_price == pytest.approx(1.0)


def test_inside_nodes_behind_slow_nics_visits_count_for_less() -> None:
    usual = load_topology("2x4")
    slow = replace(usual, links=(Link(bandwidth=3e9, latency_s=3e-5), usual.links[1]))
    assert tree_of(usual).children[0].visit_price == pytest.approx(1.0)
    assert tree_of(slow).children[0].visit_price == pytest.approx(1 / 8)
