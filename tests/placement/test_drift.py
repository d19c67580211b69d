from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from placement.drift import _distances, measure_drift
from placement.errors import TraceError
from placement.trace import RoutingTrace, load_trace

LAYERS, EXPERTS, TOP_K, LENGTH = 3, 12, 2, 20


def _trace(requests: int, favourites: float, seed: int) -> RoutingTrace:
    """Requests that each like a few experts of their own; favourites: the share of those that like the first six."""
    rng = np.random.default_rng(seed)
    experts = []
    for _ in range(requests):
        half = 0 if rng.random() < favourites else 6
        like = half + rng.permutation(6)[:4]
        experts.append(like[rng.random((LENGTH, LAYERS, 4)).argsort(axis=2)[:, :, :TOP_K]])
    num_tokens = requests * LENGTH
    return RoutingTrace(
        num_experts=EXPERTS,
        experts=np.concatenate(experts).astype(np.uint8),
        request=np.repeat(np.arange(requests), LENGTH),
        position=np.tile(np.arange(LENGTH), requests).astype(np.int32),
        step=np.zeros(num_tokens, np.int64),
        source_rank=np.full(num_tokens, -1, np.int32),
        phase=np.zeros(num_tokens, np.uint8),
    )


def test_the_distance_is_jensen_and_shannons() -> None:
    one, other = np.array([3.0, 5.0, 0.0, 2.0], np.float32), np.array([1.0, 0.0, 4.0, 2.0], np.float32)
    found = _distances(one[None], one + other)
    assert found[0] == pytest.approx(jensenshannon(one, other, base=2))


def test_traffic_that_moves_to_other_experts_has_drifted() -> None:
    drift = measure_drift(_trace(60, 0.9, 0), _trace(60, 0.2, 1))
    assert drift.load.drifted
    assert drift.affinity.drifted
    assert "traffic has drifted: load" in drift.says()


def test_two_samples_of_one_traffic_differ_by_chance_alone() -> None:
    found = [measure_drift(_trace(40, 0.5, 2 * seed), _trace(40, 0.5, 2 * seed + 1), seed=seed) for seed in range(30)]
    assert sum(drift.drifted for drift in found) <= 3
    assert all(drift.load.distance > 0.02 for drift in found)
    assert "no drift beyond chance" in next(drift for drift in found if not drift.drifted).says()


def test_few_requests_are_not_taken_for_drift_however_different_they_look() -> None:
    assert not measure_drift(_trace(60, 0.5, 0), _trace(2, 1.0, 1)).load.drifted


def test_a_change_of_pairs_at_equal_load_is_a_drift_of_affinity_alone() -> None:
    planned = _trace(80, 0.5, 0)
    shuffled = planned.experts.copy()
    rng = np.random.default_rng(0)
    for layer in range(LAYERS):
        for column in range(TOP_K):
            shuffled[:, layer, column] = rng.permutation(shuffled[:, layer, column])
    drift = measure_drift(planned, replace(planned, experts=shuffled))
    assert not drift.load.drifted
    assert drift.affinity.drifted


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(2, 12), st.floats(0, 1), st.integers(0, 1000))
def test_distances_lie_between_nothing_and_all(planned: int, present: int, favourites: float, seed: int) -> None:
    drift = measure_drift(_trace(planned, favourites, seed), _trace(present, 0.5, seed + 1), seed=seed)
    for one in (drift.load, drift.affinity):
        assert 0 <= one.chance <= one.floor <= 1
        assert 0 <= one.distance <= 1


def test_the_same_trace_and_seed_give_the_same_figures() -> None:
    one, other = _trace(20, 0.5, 0), _trace(20, 0.4, 1)
    assert measure_drift(one, other, seed=3) == measure_drift(one, other, seed=3)


def test_one_expert_a_token_has_no_pairs() -> None:
    trace = _trace(20, 0.5, 0)
    single = replace(trace, experts=trace.experts[:, :, :1])
    assert measure_drift(single, single).affinity.distance == 0


def test_another_model_or_too_little_traffic_is_refused() -> None:
    trace = _trace(10, 0.5, 0)
    with pytest.raises(TraceError, match="num_experts 12, present traffic has 16"):
        measure_drift(trace, replace(trace, num_experts=16))
    with pytest.raises(TraceError, match=r"two requests at least .* got 10 and 1"):
        measure_drift(trace, trace.select(trace.request == 0))


def test_workloads_of_a_real_trace_drift_apart_and_a_random_half_does_not() -> None:
    path = Path(__file__).parents[3] / "shared" / "traces" / "gpt-oss-20b.npz"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    trace = load_trace(path)
    trace = trace.select(trace.position % 8 == 0)
    assert not measure_drift(*trace.split_by_request()).drifted
    early = trace.request < np.median(trace.request)  # its workloads follow each other
    assert measure_drift(trace.select(early), trace.select(~early)).drifted
