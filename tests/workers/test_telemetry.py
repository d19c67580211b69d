from __future__ import annotations

import logging

import pytest

from workers.telemetry import FINE, LOW, SUSTAINED_WINDOWS, VERY_LOW, WINDOW_LOOKUPS, CacheCounters


def _windows(counters: CacheCounters, count: int, rate: float) -> None:
    for _ in range(count):
        counters.look_up(WINDOW_LOOKUPS, int(rate * WINDOW_LOOKUPS))


def test_a_hit_rate_that_stays_low_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    counters = CacheCounters()
    _windows(counters, SUSTAINED_WINDOWS - 1, 0.7)
    assert (counters.alarm, caplog.records) == (FINE, [])
    _windows(counters, 20, 0.7)
    assert counters.alarm == LOW
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_one_low_window_between_good_ones_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    counters = CacheCounters()
    for _ in range(5):
        _windows(counters, 2, 0.6)
        _windows(counters, 1, 0.9)
    assert (counters.alarm, caplog.records) == (FINE, [])


def test_below_half_the_log_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    counters = CacheCounters()
    _windows(counters, SUSTAINED_WINDOWS, 0.7)
    _windows(counters, 4, 0.3)
    assert counters.alarm == VERY_LOW
    assert "lower max_batch_tokens" in caplog.records[-1].message
    assert len(caplog.records) == 2


def test_after_a_good_time_the_alarm_can_come_again(caplog: pytest.LogCaptureFixture) -> None:
    counters = CacheCounters()
    for _ in range(2):
        _windows(counters, SUSTAINED_WINDOWS, 0.7)
        _windows(counters, 1, 0.95)
        assert counters.alarm == FINE
    assert len(caplog.records) == 2
