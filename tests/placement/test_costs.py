"""The cost model by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from placement.baselines import linear_placement
from placement.costs import ModelSizes, step_time
from placement.topology import Device, Link, Topology, load_topology
from tests.placement.planner_cases import make_trace
from tests.placement.test_evaluate import two_tokens

SIZES = ModelSizes(token_bytes=100.0, expert_bytes=1000.0, pair_flops=10.0)


def small_cluster(node_bandwidth: float = 50.0) -> Topology:
    links = (Link(bandwidth=node_bandwidth, latency_s=1.0), Link(bandwidth=200.0, latency_s=0.5))
    return replace(load_topology("2x2"), links=links, device=Device(hbm_bandwidth=500.0, peak_flops=10.0))


def test_a_step_by_hand() -> None:
    """Both tokens are at home on rank 0 with expert 0. Rank 1 reads expert 1 (2 s), computes 2 pairs (2 s): 4 s.

    Node link: one vector (expert 3): 1 s + 100/50 = 3 s. GPU link: rank 0 sends two to rank 1: 0.5 s + 200/200 = 1.5 s.
    Dispatch and combine: 2 x 4.5 s.
    """
    placement = linear_placement(1, 4, 4, 1)
    homes = np.zeros(2, np.int32)
    time = step_time(placement, small_cluster(), two_tokens(), homes, SIZES, 512)
    assert time.compute_s == pytest.approx(4.0)
    assert time.exchange_s == pytest.approx(9.0)
    assert time.mean_s == time.p99_s == pytest.approx(13.0)
    assert (time.tokens_per_step, time.num_steps) == (2, 1)
    overlapped = step_time(placement, small_cluster(), two_tokens(), homes, SIZES, 512, overlap=True)
    assert overlapped.mean_s == pytest.approx(9.0)


def test_a_token_with_everything_at_home_sends_nothing() -> None:
    placement = linear_placement(1, 4, 4, 4)
    time = step_time(placement, small_cluster(), two_tokens(), np.array([0, 3], np.int32), SIZES, 512)
    assert time.exchange_s == 0.0


def test_slower_links_cost_more_and_steps_are_counted() -> None:
    trace = make_trace(num_tokens=300)
    placement = linear_placement(2, 8, 4, 2)
    homes = (trace.request % 4).astype(np.int32)
    fast, slow = (step_time(placement, small_cluster(bandwidth), trace, homes, SIZES, 100) for bandwidth in (50.0, 5.0))
    assert slow.mean_s > fast.mean_s
    assert slow.compute_s == fast.compute_s
    assert fast.num_steps == 3
