"""The compiled search against plain code: same objective, only legal changes, the optimum of small instances."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from placement.cover import masks_of, serve_units
from placement.refine import Costs, Sample, Stage, refine, refine_logged
from placement.search import Weights, imbalance

HOPS_ONLY = Costs(visit=1.0, balance=0.0)


def plain_visits(slots: NDArray[np.int32], sample: Sample) -> int:
    """The fewest units beside home for every token, by trying all."""
    total = 0
    for chosen, home in zip(sample.chosen, sample.home, strict=True):
        holders = [{u for u, row in enumerate(slots) if e in row} for e in chosen if e >= 0]
        others = [u for u in range(len(slots)) if u != home]
        total += next(
            n
            for n in range(len(slots) + 1)
            if any(all(h & {home, *tried} for h in holders) for tried in combinations(others, n))
        )
    return total


def compiled_visits(slots: NDArray[np.int32], sample: Sample, num_experts: int) -> int:
    masks, _ = masks_of(slots, num_experts)
    out = np.empty(sample.chosen.shape[1], np.int8)
    return sum(int(serve_units(c, h, masks, out)) for c, h in zip(sample.chosen, sample.home, strict=True))


def random_sample(rng: np.random.Generator, num_units: int, num_experts: int, num_tokens: int = 60) -> Sample:
    top_k = min(3, num_experts)
    chosen = np.argsort(rng.random((num_tokens, num_experts)) ** 3, axis=1)[:, :top_k].astype(np.int16)
    home = rng.integers(-1, num_units, num_tokens).astype(np.int16)
    return Sample(chosen=chosen, home=home, group=(np.arange(num_tokens) % 2).astype(np.uint8))


def random_slots(rng: np.random.Generator, num_units: int, num_experts: int, spare: int) -> NDArray[np.int32]:
    rows: list[list[int]] = [[] for _ in range(num_units)]
    for index, expert in enumerate(rng.permutation(num_experts)):
        rows[index % num_units].append(int(expert))
    width = max(len(row) for row in rows) + spare
    for row in rows:
        row += rng.permutation(np.setdiff1d(np.arange(num_experts), row))[: width - len(row)].tolist()
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)


@given(st.integers(2, 4), st.integers(4, 9), st.integers(0, 2), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_serving_with_bits_finds_the_fewest_units(num_units: int, num_experts: int, spare: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, sample = random_slots(rng, num_units, num_experts, spare), random_sample(rng, num_units, num_experts, 20)
    assert compiled_visits(slots, sample, num_experts) == plain_visits(slots, sample)


@given(st.integers(2, 4), st.integers(4, 9), st.integers(0, 2), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_search_keeps_every_expert_and_never_doubles_one(
    num_units: int, num_experts: int, spare: int, seed: int, hot: bool
) -> None:
    rng = np.random.default_rng(seed)
    slots, sample = random_slots(rng, num_units, num_experts, spare), random_sample(rng, num_units, num_experts)
    sizes, share = np.full(num_units, slots.shape[1]), np.full(num_units, 1 / num_units)
    stage = Stage(tokens=100, proposals=200, hot=0.5 if hot else 0.0)
    found = refine(slots, sizes, share, sample, num_experts, Costs(), stage, seed % 1000)
    assert set(found[found >= 0].tolist()) == set(range(num_experts))
    for row in found:
        held = row[row >= 0].tolist()
        assert len(set(held)) == len(held)


def test_the_search_keeps_as_many_copies_as_an_expert_must_have() -> None:
    rng = np.random.default_rng(3)
    slots, sample = random_slots(rng, 4, 8, 1), random_sample(rng, 4, 8)
    before = np.bincount(slots.ravel(), minlength=8)
    stage = Stage(tokens=100, proposals=300, hot=0.5)
    sizes, share = np.full(4, slots.shape[1]), np.full(4, 0.25)
    free = refine(slots, sizes, share, sample, 8, HOPS_ONLY, stage, 1)
    held = refine(slots, sizes, share, sample, 8, HOPS_ONLY, stage, 1, fewest=before)
    assert (np.bincount(held.ravel(), minlength=8) == before).all()
    assert (np.bincount(free.ravel(), minlength=8) != before).any()


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_result_is_never_worse_and_the_log_leads_to_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, sample = random_slots(rng, 4, 8, 1), random_sample(rng, 4, 8)
    sizes, share = np.full(4, slots.shape[1]), np.full(4, 0.25)
    found, log = refine_logged(slots, sizes, share, sample, 8, HOPS_ONLY, Stage(tokens=100, proposals=300), 1)
    walked = slots.copy()
    for one, row, two, other, swap in log.tolist():
        out, into = walked[one, row], walked[two, other]
        walked[one, row] = into
        if swap:
            walked[two, other] = out
    assert (walked == found).all()
    assert plain_visits(found, sample) <= plain_visits(slots, sample)


@pytest.mark.parametrize("seed", range(3))
def test_small_instances_are_solved_to_the_exact_optimum(seed: int) -> None:
    """Six experts on three units of two: all 90 placements tried by brute force, on the hops alone."""
    rng = np.random.default_rng(seed)
    sample = random_sample(rng, 3, 6, 40)
    every = {tuple(sorted(order[i : i + 2]) for i in (0, 2, 4)).__repr__(): order for order in permutations(range(6))}
    best = min(plain_visits(np.array(order, np.int32).reshape(3, 2), sample) for order in every.values())
    stage = Stage(tokens=100, proposals=3000, hot=0.3)
    start = np.arange(6, dtype=np.int32).reshape(3, 2)
    one_group = Sample(chosen=sample.chosen, home=sample.home, group=np.zeros(40, np.uint8))
    found = refine(start, np.full(3, 2), np.full(3, 1 / 3), one_group, 6, HOPS_ONLY, stage, 0)
    assert plain_visits(found, sample) == best


def test_ranks_inside_nodes_are_searched_with_nodes_first() -> None:
    rng = np.random.default_rng(0)
    sample = random_sample(rng, 4, 8)
    slots = random_slots(rng, 4, 8, 0)
    nodes = np.array([0, 0, 1, 1], np.int32)
    costs = Costs(visit=1.0, unit_visit=0.01, balance=0.0)
    found = refine(slots, np.full(4, 2), np.full(4, 0.25), sample, 8, costs, Stage(tokens=99, proposals=900), 0, nodes)
    at_home = np.where(sample.home >= 0, nodes[sample.home], -1).astype(np.int16)
    by_node = Sample(chosen=sample.chosen, home=at_home, group=sample.group)
    assert plain_visits(found.reshape(2, 4), by_node) <= plain_visits(slots.reshape(2, 4), by_node)


def test_imbalance_is_one_for_level_load_and_grows_with_the_heaviest_and_with_local_homes() -> None:
    share, square, weights = np.full(4, 0.25), np.full(4, 25.0), Weights(1.0, 0.0, 1.0, 256.0, 0.0, 0.2)
    spread_out = np.vstack([np.full((4, 4), 25.0), np.zeros(4)])
    at_home = np.vstack([np.eye(4) * 100, np.zeros(4)])
    skewed = np.vstack([np.full((4, 4), 25.0) * [2, 1, 1, 1], np.zeros(4)])
    assert imbalance(spread_out, square, share, 200.0, weights) == pytest.approx(1.0)
    assert imbalance(at_home, square, share, 200.0, weights) > 1.1
    assert imbalance(skewed, square, share, 200.0, weights) > 1.4
    assert imbalance(np.zeros((5, 4)), np.zeros(4), share, 200.0, weights) == 1.0
