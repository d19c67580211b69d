"""Intervals over requests, and the slots curve."""

from __future__ import annotations

import numpy as np
import pytest

from placement.curve import fewest_rows, slots_curve
from placement.errors import ConfigError
from placement.topology import load_topology
from placement.trust import compare
from tests.placement.planner_cases import make_trace


def test_a_steady_gain_holds_and_counts_what_is_behind_it() -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(5, 10, 1000).astype(np.int32)
    gain = compare(before, before - 2, np.repeat(np.arange(50), 20))
    assert gain.holds
    assert gain.low < gain.ratio < gain.high < 1
    assert (gain.num_tokens, gain.num_requests) == (1000, 50)


def test_a_gain_of_one_request_among_losers_does_not_hold() -> None:
    request = np.repeat(np.arange(10), 100)
    before = np.full(1000, 10, np.int32)
    after = np.where(request == 0, 0, 11).astype(np.int32)
    gain = compare(before, after, request)
    assert gain.ratio < 1
    assert not gain.holds


def test_nothing_visited_before_is_no_gain() -> None:
    nothing = np.zeros(10, np.int32)
    gain = compare(nothing, nothing, np.arange(10))
    assert (gain.ratio, gain.holds) == (1.0, False)


def test_more_slots_save_more_and_the_fewest_are_found() -> None:
    trace = make_trace(num_tokens=2000, num_requests=40)
    curve = slots_curve(trace, load_topology("2x2"), [2, 4, 8])
    assert curve[0].saved == 0
    assert curve[-1].nodes_visited == 0
    assert [point.num_slots for point in curve] == [8, 16, 32]
    assert fewest_rows(curve, 1.0) in (4, 8)
    assert fewest_rows(curve[:1], 0.5) is None


def test_a_curve_of_no_points_is_refused() -> None:
    with pytest.raises(ConfigError):
        slots_curve(make_trace(), load_topology("2x2"), [])
