"""Intervals over requests, and the slots curve."""

from __future__ import annotations

import numpy as np
import pytest

from placement.curve import fewest_rows, rows_between, slots_curve
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
    curve = list(slots_curve(trace, load_topology("2x2"), [2, 4, 8]))
    assert curve[0].saved == 0
    assert curve[-1].nodes_visited == 0
    assert [point.num_slots for point in curve] == [8, 16, 32]
    assert fewest_rows(curve, 1.0) in (4, 8)
    assert fewest_rows(curve[:1], 0.5) is None


def test_a_curve_of_no_points_is_refused() -> None:
    with pytest.raises(ConfigError):
        next(slots_curve(make_trace(), load_topology("2x2"), []))


@pytest.mark.parametrize(
    ("first", "last", "points", "rows"), [(1.0, 2.0, 9, [2, 3, 4]), (1.0, 4.0, 3, [2, 5, 8]), (1.1, 1.1, 9, [3])]
)
def test_rows_are_spread_evenly_over_the_range(first: float, last: float, points: int, rows: list[int]) -> None:
    assert rows_between(load_topology("2x2"), 8, first, last, points) == rows


@pytest.mark.parametrize(("first", "last", "points"), [(0.9, 2.0, 9), (2.0, 1.0, 9), (1.0, 5.0, 9), (1.0, 2.0, 1)])
def test_a_range_that_holds_no_plan_is_refused(first: float, last: float, points: int) -> None:
    with pytest.raises(ConfigError):
        rows_between(load_topology("2x2"), 8, first, last, points)
