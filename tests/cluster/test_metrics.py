"""What the metrics are worth, from samples of ranks and events of a history."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import history as states
from cluster.history import HistoryEvent
from cluster.metrics import GAUGES, LABELS, Sample, history_readings, rank_readings
from workers.vitals import WorkerStatus


def _status(rank: int, *, pairs: int, tokens: int = 100, steps: int = 10, **more: Any) -> WorkerStatus:
    usual: dict[str, Any] = {
        "rank": rank,
        "epoch": 3,
        "alive": True,
        "error": None,
        "steps": steps,
        "experts": 4,
        "host_slab_bytes": 0,
        "slot_bytes": 0,
        "cache": {
            "lookups": 10 * steps,
            "hits": 4 * steps,
            "stall_s": 0.01 * steps,
            "copies": 8 * steps,
            "prefetched": 4 * steps,
            "prefetch_used": 3 * steps,
            "alarm": 1,
        },
        "recorder": {"tokens_dropped": 5},
        "tokens": tokens,
        "step_s": 0.02 * steps,
        "traffic": {"tokens": tokens, "nodes_visited": tokens // 2, "ranks_visited": tokens, "pairs": pairs},
    }
    return WorkerStatus(**(usual | more))


def _samples(**more: Any) -> tuple[Sample, Sample]:
    before = Sample(at_s=10.0, statuses=(_status(0, pairs=0), _status(1, pairs=0)))
    later = (
        _status(0, pairs=60, tokens=200, steps=20, **more),
        _status(1, pairs=20, tokens=300, steps=20),
    )
    return before, Sample(at_s=15.0, statuses=later)


def test_rates_and_ratios_are_those_of_the_time_between_two_samples() -> None:
    readings = {name: value for (name, _), value in rank_readings(*_samples()).items()}
    assert readings["moetis_tokens_per_second"] == pytest.approx((100 + 200) / 5)
    assert readings["moetis_step_seconds"] == pytest.approx(0.02)
    assert readings["moetis_load_imbalance"] == pytest.approx(60 / 40)
    assert readings["moetis_nodes_visited_per_token"] == pytest.approx(0.5)
    assert readings["moetis_cache_hit_ratio"] == pytest.approx(0.4)
    assert readings["moetis_stall_share"] == pytest.approx(2 * 0.1 / (5 * 2))
    assert readings["moetis_prefetch_precision"] == pytest.approx(3 / 4)
    assert readings["moetis_prefetch_coverage"] == pytest.approx(3 / 7)
    assert readings["moetis_cache_alarm"] == 1
    assert readings["moetis_recorder_lost_tokens"] == 10
    assert (readings["moetis_ranks_alive"], readings["moetis_epoch"], readings["moetis_epoch_spread"]) == (2, 3, 0)


def test_a_rank_that_is_stale_or_dead_shows() -> None:
    readings = rank_readings(*_samples(epoch=2, alive=False))
    assert readings["moetis_epoch", ""] == 2
    assert readings["moetis_epoch_spread", ""] == 1
    assert readings["moetis_ranks_alive", ""] == 1


def test_no_rates_at_first_nor_across_a_restart_nor_a_change_of_ranks() -> None:
    before, now = _samples()
    restarted = Sample(at_s=20.0, statuses=(_status(0, pairs=0, tokens=0), now.statuses[1]))
    fewer = Sample(at_s=20.0, statuses=(_status(0, pairs=900),))
    for earlier, later in ((None, before), (now, restarted), (now, fewer), (now, now)):
        assert ("moetis_tokens_per_second", "") not in rank_readings(earlier, later)
    assert rank_readings(None, Sample(at_s=0, statuses=()))["moetis_ranks_alive", ""] == 0


def test_an_idle_cluster_has_a_rate_of_zero_and_no_ratios() -> None:
    before, _ = _samples()
    readings = rank_readings(before, Sample(at_s=20.0, statuses=before.statuses))
    assert readings["moetis_tokens_per_second", ""] == 0
    assert ("moetis_load_imbalance", "") not in readings
    assert ("moetis_cache_hit_ratio", "") not in readings


def _event(epoch: int, state: str, **detail: Any) -> HistoryEvent:
    return HistoryEvent(epoch=epoch, state=state, detail=detail, at="2026-11-29T12:00:00.000Z")


DRIFT = {what: {"distance": 0.3, "floor": 0.1, "chance": 0.05} for what in ("load", "affinity")}


def test_decisions_migrations_and_drift_come_from_the_history() -> None:
    moved = {"bytes": 1000, "copy_s": 0.5, "switch_s": 0.1}
    readings = history_readings(
        [
            _event(0, states.DONE, reason="initial placement"),
            _event(1, states.PLANNED),
            _event(1, states.DONE, **moved),
            _event(2, states.LEFT, reason="too little"),
            _event(3, states.COPYING, round=0),
            _event(4, states.PLANNED),
            _event(4, states.DONE, **moved),
            _event(4, states.MEASURED, promised={"ratio": 0.5}, after_over_before={"ratio": 0.6}),
            _event(4, states.DRIFT, due=True, says="", drift=DRIFT),
            _event(5, states.COPYING, round=2),
        ],
        {4: 60.0, 5: 42.0},
    )
    assert readings["moetis_decisions", "applied"] == 3
    assert readings["moetis_decisions", "left"] == readings["moetis_decisions", "aborted"] == 1
    assert readings["moetis_decisions", "under_way"] == 1
    assert readings["moetis_migration_under_way_seconds", ""] == 42
    assert readings["moetis_migrated_bytes", ""] == 2000
    assert readings["moetis_promise_kept_ratio", ""] == pytest.approx(1.2)
    assert readings["moetis_drift_distance", "affinity"] == 0.3
    assert readings["moetis_drift_floor", "load"] == 0.1


def test_all_that_is_read_has_a_name_and_a_label_where_it_should() -> None:
    before, now = _samples()
    everything = rank_readings(before, now) | history_readings(
        [
            _event(1, states.DONE, bytes=1, copy_s=1, switch_s=1),
            _event(1, states.MEASURED, promised={"ratio": 1}, after_over_before={"ratio": 1}),
            _event(1, states.DRIFT, drift=DRIFT),
        ],
        {},
    )
    assert {name for name, _ in everything} == set(GAUGES)
    assert all(bool(label) == (name in LABELS) for name, label in everything)
