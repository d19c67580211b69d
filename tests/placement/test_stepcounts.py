"""Counts of steps by hand, against the cost model, and against a plain least-recently-used cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.baselines import linear_placement, random_placement
from placement.batches import draw_steps, group_requests, phase_tokens, recorded_steps
from placement.core import Tier
from placement.costs import ModelSizes, step_time
from placement.dispatch import choose_ranks
from placement.errors import ConfigError
from placement.homes import random_homes
from placement.pricing import step_cost
from placement.stepcounts import Steps, count_steps
from placement.topology import load_topology
from placement.trace import DECODE, PREFILL, RoutingTrace
from tests.placement.planner_cases import make_trace, shapes
from tests.placement.test_costs import SIZES, small_cluster
from tests.placement.test_evaluate import two_tokens


def all_at_once(trace: RoutingTrace) -> Steps:
    return Steps(index=np.arange(trace.num_tokens), bounds=np.array([0, trace.num_tokens]))


def test_a_step_by_hand() -> None:
    """Both tokens are at home on rank 0 with expert 0; expert 1 is on rank 1, expert 3 on the other node."""
    trace, homes = two_tokens(), np.zeros(2, np.int32)
    counts = count_steps(linear_placement(1, 4, 4, 1), small_cluster(), trace, homes, all_at_once(trace))
    assert counts.pairs.tolist() == [[[1, 2, 0, 1]]]
    assert counts.read.tolist() == [[[1, 1, 0, 1]]]
    assert counts.vectors.tolist() == counts.busiest.tolist() == [[[1, 2]]]
    assert counts.hit_rate == 1.0
    cost = step_cost(counts, small_cluster(), replace(SIZES, combine_bytes=200.0))
    assert (cost.compute_s, cost.miss_s) == (pytest.approx(4.0), 0.0)
    assert (cost.dispatch_s, cost.combine_s) == (pytest.approx(3.0 + 1.5), pytest.approx(5.0 + 2.5))
    assert cost.bytes_per_token == {"node": 150.0, "gpu": 300.0}
    assert cost.mean_s == pytest.approx(16.0)


@given(shapes())
@settings(max_examples=25)
def test_priced_counts_are_the_cost_model(case: tuple[RoutingTrace, object, int, int]) -> None:
    trace, topology, rows, seed = case
    placement = random_placement(trace.num_layers, trace.num_experts, topology.num_ranks, rows, seed)
    homes = random_homes(trace.request, topology.num_ranks)
    counts = count_steps(placement, topology, trace, homes, all_at_once(trace))
    sizes = ModelSizes(combine_bytes=5e3)
    mine, theirs = step_cost(counts, topology, sizes), step_time(placement, topology, trace, homes, sizes, 10**6)
    assert mine.mean_s == pytest.approx(theirs.mean_s)
    assert mine.compute_s == pytest.approx(theirs.compute_s)
    assert int(counts.pairs.sum()) == trace.num_tokens * trace.num_layers * trace.top_k


def plain_misses(reads: list[set[int]], room: int) -> list[int]:
    """An LRU cache as `workers/slot_cache.py` runs it: a step's hits first, then its misses, ascending."""
    cache: OrderedDict[int, None] = OrderedDict()
    missed = []
    for step in reads:
        hits = [expert for expert in sorted(step) if expert in cache]
        misses = [expert for expert in sorted(step) if expert not in cache]
        for expert in hits:
            cache.move_to_end(expert)
        for expert in misses:
            if len(cache) == room:
                cache.popitem(last=False)
            cache[expert] = None
        missed.append(len(misses))
    return missed


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 100))
@settings(max_examples=40)
def test_misses_are_those_of_a_plain_least_recently_used_cache(room: int, batch: int, seed: int) -> None:
    trace = make_trace(num_tokens=60, num_layers=1, num_experts=12, top_k=2, seed=seed)
    topology, placement = load_topology("2x1"), linear_placement(1, 12, 2, 6)
    homes = random_homes(trace.request, 2)
    steps = draw_steps(trace, phase_tokens(trace, DECODE), batch, 60, np.random.default_rng(seed))
    counts = count_steps(placement, topology, trace, homes, steps, gpu_slots=room, warm_up=False)
    holds, nodes = placement.copies_per_rank()[0], topology.node_of_rank()
    for rank in range(2):
        reads = []
        for first, last in zip(steps.bounds[:-1], steps.bounds[1:], strict=True):
            own = steps.index[first:last]
            ranks = choose_ranks(trace.experts[own, 0], homes[own], holds, nodes)
            reads.append({int(expert) for expert in trace.experts[own, 0][ranks == rank]})
        assert counts.missed[:, 0, rank].tolist() == plain_misses(reads, room)


def test_hot_experts_never_miss_and_must_leave_room() -> None:
    trace, topology = make_trace(num_layers=1), load_topology("2x1")
    placement = linear_placement(1, 8, 2, 4)
    homes = random_homes(trace.request, 2)
    steps = draw_steps(trace, phase_tokens(trace, DECODE), 10, 400, np.random.default_rng(0))
    tiers = np.full((1, 8), Tier.WARM, np.uint8)
    tiers[0, [0, 4]] = Tier.HOT
    hot = replace(placement, tiers=tiers)
    without, with_hot = (
        count_steps(one, topology, trace, homes, steps, gpu_slots=slots) for one, slots in ((placement, 1), (hot, 2))
    )
    assert with_hot.missed.sum() < without.missed.sum()
    with pytest.raises(ConfigError, match="leave no slot to cache in on rank 0, layer 0"):
        count_steps(hot, topology, trace, homes, steps, gpu_slots=1)


def test_prefill_steps_hold_whole_requests_and_decode_steps_mix_them() -> None:
    trace = make_trace(num_tokens=400, num_requests=20)
    rng = np.random.default_rng(0)
    decode, prefill = (draw_steps(trace, phase_tokens(trace, phase), 40, 400, rng) for phase in (DECODE, PREFILL))
    assert phase_tokens(trace, PREFILL).stand_in and not phase_tokens(trace, DECODE).stand_in
    assert np.sort(decode.index).tolist() == np.sort(prefill.index).tolist() == list(range(400))
    kinds = [
        np.mean([len(np.unique(part)) for part in trace.request[one.index].reshape(10, 40)])
        for one in (decode, prefill)
    ]
    assert kinds[0] > 2 * kinds[1]


def test_a_batch_larger_than_the_trace_repeats_it() -> None:
    trace = make_trace(num_tokens=30)
    steps = draw_steps(trace, phase_tokens(trace, DECODE), 75, 10, np.random.default_rng(0))
    assert steps.num_steps == 1
    assert set(np.bincount(steps.index).tolist()) == {2, 3}
    with pytest.raises(ConfigError, match="1 token or more"):
        draw_steps(trace, phase_tokens(trace, DECODE), 0, 10, np.random.default_rng(0))


def test_recorded_steps_keep_their_tokens_and_numbers() -> None:
    numbers, steps = recorded_steps(np.array([7, 3, 7, 9]))
    assert numbers.tolist() == [3, 7, 9]
    assert [steps.index[a:b].tolist() for a, b in zip(steps.bounds, steps.bounds[1:], strict=False)] == [
        [1],
        [0, 2],
        [3],
    ]


def test_groups_of_requests_are_of_nearly_equal_number() -> None:
    group = group_requests(np.repeat(np.arange(10), 3), 4)
    members = [len(set(np.flatnonzero(group == number) // 3)) for number in range(4)]
    assert sorted(members) == [2, 2, 3, 3]
