"""Scheduled and drift rebalancing, previews, measured effects and the history, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from cluster import history as states
from cluster.durations import seconds_of
from cluster.history import History
from cluster.rebalance import run_rounds
from cluster.traffic import REFERENCE, Traffic
from placement.errors import ConfigError, MigrationError, MoetisError, TraceError
from placement.trace import RoutingTrace, read_segment, write_segment
from tests.cluster.local_ranks import EXPERTS, LAYERS
from tests.cluster.running_cli import moetis_here
from tests.cluster.test_service import make_ranks, make_service


def _segment(folder: Path, rank: int, number: int, *, taste: int, requests: int = 20, seed: int = 0) -> None:
    """Requests that like experts of one parity (taste 0 or 1), or of both in turn (2)."""
    rng = np.random.default_rng(seed)
    length = 30
    request = np.repeat(np.arange(requests) + 1000 * number, length)
    pick = rng.random((len(request), LAYERS, EXPERTS // 2)).argsort(axis=2)[:, :, :2]
    parity = request // 2 % 2 if taste == 2 else np.full(len(request), taste)
    write_segment(
        RoutingTrace(
            num_experts=EXPERTS,
            experts=(2 * pick + parity[:, None, None]).astype(np.uint8),
            request=request.astype(np.int64),
            position=np.tile(np.arange(length), requests).astype(np.int32),
            step=np.zeros(len(request), np.int64),
            source_rank=np.full(len(request), rank, np.int32),
            phase=np.zeros(len(request), np.uint8),
        ),
        folder / f"rank{rank:05d}-{number:08d}.safetensors",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(2):
        _segment(tmp_path, rank, 0, taste=2, seed=rank)
    return tmp_path


def _stored(folder: Path) -> list[tuple[int, str]]:
    return [(event.epoch, event.state) for event in History(folder / "history.sqlite").events()]


def test_a_preview_stores_and_moves_nothing(folder: Path) -> None:
    ranks = make_ranks()
    service = make_service(folder, ranks)
    before = _stored(folder)
    result = service.preview()
    assert result.decision == "would apply"
    assert result.migration is not None
    assert result.migration.num_moves > 0
    assert _stored(folder) == before
    assert not (folder / REFERENCE).exists()
    assert service.current.placement.epoch == 0
    assert {rank.table.epoch for rank in ranks.ranks} == {0}


def test_a_preview_says_why_a_plan_would_be_left(folder: Path) -> None:
    result = make_service(folder, make_ranks(), min_gain=0.99).preview()
    assert result.decision == "would leave"
    assert "at least 99.0% is asked for" in result.reason


def test_the_effect_of_a_plan_is_measured_on_the_traffic_after_it(folder: Path) -> None:
    service = make_service(folder, make_ranks())
    assert service.rebalance().decision == "applied"
    history = History(folder / "history.sqlite")
    service.drift()
    assert (1, states.MEASURED) not in _stored(folder)
    _segment(folder, 0, 1, taste=2, seed=5)
    service.drift()
    effect = next(event.detail for event in history.events() if (event.epoch, event.state) == (1, states.MEASURED))
    assert effect["after"]["num_tokens"] == 600
    assert effect["after"]["nodes_visited"] < effect["before"]["nodes_visited"]
    assert effect["promised"]["ratio"] < 1
    _segment(folder, 1, 1, taste=2, seed=6)
    service.rebalance()
    again = [event.detail for event in history.events() if (event.epoch, event.state) == (1, states.MEASURED)]
    assert [detail["after"]["num_tokens"] for detail in again] == [1200]


def test_drift_is_due_at_first_then_only_when_traffic_has_changed(folder: Path) -> None:
    service = make_service(folder, make_ranks())
    first = service.drift()
    assert first.due
    assert first.says == "no decision yet, 40 requests recorded" or "20 requests" in first.says
    service.rebalance()
    assert "too little traffic since the last decision" in service.drift().says
    _segment(folder, 0, 1, taste=2, seed=7)
    alike = service.drift()
    assert not alike.due
    assert "no drift beyond chance" in alike.says
    _segment(folder, 0, 2, taste=0, requests=60, seed=8)
    changed = service.drift()
    assert changed.due
    assert changed.drift is not None
    assert changed.drift.load.drifted


def test_after_a_decision_to_leave_it_the_same_traffic_is_not_planned_for_again(folder: Path) -> None:
    service = make_service(folder, make_ranks(), min_gain=0.99)
    assert service.rebalance().decision == "left"
    _segment(folder, 0, 1, taste=2, seed=7)
    assert not service.drift().due


def test_what_drift_is_measured_against_survives_a_restart(folder: Path) -> None:
    make_service(folder, make_ranks()).rebalance()
    _segment(folder, 0, 1, taste=0, requests=60, seed=8)
    assert make_service(folder, make_ranks()).drift().due


def test_a_decision_made_for_another_model_is_made_again(folder: Path) -> None:
    service = make_service(folder, make_ranks())
    service.rebalance()
    other = read_segment(folder / REFERENCE)
    Traffic(folder, folder / REFERENCE, window_tokens=100).keep_reference(replace(other, num_experts=99), seed=0)
    _segment(folder, 0, 1, taste=2, seed=7)
    check = service.drift()
    assert check.due
    assert check.says == "the last decision was made for another model"


def test_a_cluster_that_has_served_nothing_has_nothing_to_plan_from(tmp_path: Path) -> None:
    check = make_service(tmp_path, make_ranks()).drift()
    assert not check.due
    assert "nothing to go by yet" in check.says


def test_a_plan_is_made_from_the_newest_tokens(tmp_path: Path) -> None:
    for number in range(5):
        for rank in range(2):
            _segment(tmp_path, rank, number, taste=2)
    traffic = Traffic(tmp_path, tmp_path / REFERENCE, window_tokens=2400)
    recent = traffic.recent()
    assert recent.num_tokens == 2400
    assert set(np.unique(recent.request // 1000)) == {3, 4}
    assert traffic.mark() == {"rank00000": 4, "rank00001": 4}
    assert set(np.unique(traffic.recent({"rank00000": 3, "rank00001": 4}).request // 1000)) == {4}
    with pytest.raises(TraceError, match="since the last decision"):
        traffic.recent(traffic.mark())


def test_a_broken_segment_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        _segment(tmp_path, rank, 0, taste=2)
    (tmp_path / "rank00000-000001.safetensors").write_bytes(b"half a segm")
    traffic = Traffic(tmp_path, tmp_path / REFERENCE, window_tokens=10_000)
    whole = traffic.recent().num_tokens
    assert "rank00000-000001.safetensors" in caplog.text
    for path in tmp_path.glob("rank*"):
        path.write_bytes(b"")
    with pytest.raises(TraceError, match="none of its segments can be read"):
        traffic.recent()
    assert whole > 0


def _failing(failures: list[MoetisError | None]) -> Callable[[], None]:
    def one_round() -> None:
        error = failures.pop(0)
        if error is not None:
            raise error

    return one_round


def test_rounds_sleep_in_between_and_end_when_they_are_done() -> None:
    slept: list[float] = []
    run_rounds(_failing([None] * 3), every_s=60, rounds=3, failed=lambda error: None, sleep=slept.append)
    assert slept == [60, 60]


def test_a_round_that_fails_is_told_and_five_in_a_row_end_it() -> None:
    told: list[str] = []
    error = MigrationError("a rank does not answer")
    rounds = [error] * 4 + [None] + [error] * 5
    with pytest.raises(MigrationError, match="a rank does not answer"):
        run_rounds(
            _failing(rounds), every_s=1, rounds=None, failed=lambda each: told.append(str(each)), sleep=lambda _: None
        )
    assert len(told) == 8
    assert rounds == []


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("1d", 86400)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text, "--every") == seconds


@pytest.mark.parametrize("text", ["", "10", "0s", "-1m", "1 week", "10M", "9999999s"])
def test_what_is_no_time_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--every: write a time above 0 such as 90s"):
        seconds_of(text, "--every")


def test_a_first_round_that_finds_no_cluster_ends_it_at_once() -> None:
    with pytest.raises(ConfigError, match="no cluster"):
        run_rounds(_failing([ConfigError("no cluster")]), every_s=1, rounds=None, failed=lambda error: None)


def _config(folder: Path) -> str:
    path = folder / "cluster.yaml"
    raw = {"model": "configs/models/demo", "topology": "2x2", "slots_per_rank": 10, "run_dir": str(folder)}
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def test_the_history_tells_what_was_promised_moved_and_measured(folder: Path) -> None:
    service = make_service(folder, make_ranks())
    service.rebalance()
    _segment(folder, 0, 1, taste=2, seed=5)
    service.drift()
    told = moetis_here("history", "--config", _config(folder), "--json")
    first, second = json.loads(told.stdout)["epochs"]
    assert (first["epoch"], first["state"], first["reason"]) == (0, "done", "initial placement")
    assert second["predicted"]["after"]["nodes_visited"] < second["predicted"]["before"]["nodes_visited"]
    assert second["migration"]["moves"] > 0
    assert second["measured"]["after_over_before"]["ratio"] < 1
    assert [event["state"] for event in second["events"]][-4:] == ["serving", "done", "measured", "drift"]
    out = folder / "p.json"
    shown = moetis_here("history", "--config", _config(folder), "--epoch", "1", "--plan-out", str(out))
    assert "committing" in shown.stdout
    assert json.loads(out.read_text())["epoch"] == 1


def test_a_history_that_is_not_there_and_an_epoch_that_never_was_are_named(folder: Path, tmp_path: Path) -> None:
    absent = moetis_here("history", "--config", _config(tmp_path))
    assert isinstance(absent.exception, ConfigError)
    assert "has never served" in str(absent.exception)
    make_service(folder, make_ranks())
    unknown = moetis_here("history", "--config", _config(folder), "--epoch", "7")
    assert "no epoch 7; the last are 0" in str(unknown.exception)


def test_options_that_do_not_go_together_are_explained(tmp_path: Path) -> None:
    alone = moetis_here("rebalance", "--config", _config(tmp_path), "--rounds", "2")
    assert "give --every too" in str(alone.exception)
    without = moetis_here("history", "--config", _config(tmp_path), "--plan-out", "p.json")
    assert "name it with --epoch" in str(without.exception)
