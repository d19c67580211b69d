"""`moetis rebalance` in all its ways, `history` and `scale`, against a cluster of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from placement.planfile import load_plan
from tests.e2e.running import Serving, demo_like_config, moetis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CODE = ["def read(path):\n", "import numpy as np\n", "package main\n", "func add(a int, b int) int {\n"]
WORDS = ["Um ein neues Dokument zu öffnen, ", "Klicken Sie auf ", "Para abrir un archivo, ", "Haga clic en el botón "]


def _serve(serving: Serving, phase: str, prompts: list[str]) -> None:
    names = [f"{phase}-{number}" for number in range(40)]
    serving.send(
        *(
            {"id": name, "prompt": prompts[number % len(prompts)], "max_new_tokens": 24}
            for number, name in enumerate(names)
        )
    )
    answers = serving.wait_for(*names)
    assert {answers[name][-1]["end"] for name in names} == {"finished"}


def _told(folder: Path, *arguments: str) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    done = moetis(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _epochs(folder: Path, config: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _told(folder, "history", "--config", str(config))["epochs"]
    return found


def test_a_dry_run_tells_what_would_be_done_and_changes_nothing(serving: Serving, folder: Path, config: Path) -> None:
    _serve(serving, "first", CODE)
    before = _epochs(folder, config)
    told = _told(folder, "rebalance", "--config", str(config), "--dry-run")
    assert told["decision"] == "would apply"
    assert told["moves"] > 0
    assert told["epoch"] == told["epoch_before"] == 0
    assert _epochs(folder, config) == before


def test_before_the_first_decision_any_traffic_is_reason_to_plan(serving: Serving, folder: Path, config: Path) -> None:
    told = _told(folder, "rebalance", "--config", str(config), "--drift")
    assert told["decision"] == "applied"
    assert (told["epoch_before"], told["epoch"]) == (0, 1)
    assert "no decision yet" in told["drift"]["says"]


def test_traffic_of_the_same_kind_has_not_drifted(serving: Serving, folder: Path, config: Path) -> None:
    _serve(serving, "same", CODE)
    told = _told(folder, "rebalance", "--config", str(config), "--drift")
    assert told["decision"] == "no drift"
    assert not told["drift"]["due"]


def test_traffic_of_another_kind_is_planned_for(serving: Serving, folder: Path, config: Path) -> None:
    _serve(serving, "other", WORDS)
    told = _told(folder, "rebalance", "--config", str(config), "--drift")
    assert told["drift"]["due"], told["drift"]["says"]
    assert told["decision"] in ("applied", "left")


def test_a_schedule_makes_its_rounds_and_ends(serving: Serving, folder: Path, config: Path) -> None:
    done = moetis(folder, "rebalance", "--config", str(config), "--every", "1s", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == 2
    assert {told["decision"] for told in rounds} <= {"applied", "left"}


def test_history_tells_what_was_promised_and_what_was_measured(serving: Serving, folder: Path, config: Path) -> None:
    lives = {life["epoch"]: life for life in _epochs(folder, config)}
    first = lives[1]
    assert first["state"] == "done"
    assert first["migration"]["moves"] > 0
    promised, measured = first["predicted"], first["measured"]
    assert promised["after"]["nodes_visited"] < promised["before"]["nodes_visited"]
    assert measured["after"]["nodes_visited"] < measured["before"]["nodes_visited"]
    plan = folder / "plan.json"
    told = moetis(folder, "history", "--config", str(config), "--epoch", "1", "--plan-out", str(plan))
    assert told.returncode == 0, told.stderr
    assert load_plan(plan).placement.epoch == 1


def test_three_seats_are_planned_for_as_three(serving: Serving, folder: Path, config: Path) -> None:
    drained = _told(folder, "scale", "--config", str(config), "--drain", "3")
    assert drained == {"seats": [0, 1, 2]}
    told = _told(folder, "rebalance", "--config", str(config))
    assert told["decision"] in ("applied", "left")
    _serve(serving, "three", CODE)
    assert _told(folder, "scale", "--config", str(config), "--add", "3") == {"seats": [0, 1, 2, 3]}
    _serve(serving, "four", CODE)
    assert _epochs(folder, config)[-1]["state"] == "done"


def test_a_plan_of_another_cluster_is_refused_at_the_start(serving: Serving, folder: Path, tmp_path: Path) -> None:
    other = demo_like_config(tmp_path, topology="3x1", slots_per_rank=16, initial_plan=str(folder / "plan.json"))
    done = moetis(tmp_path, "serve", "--config", str(other))
    assert done.returncode == 2
    assert "is for 4 ranks (not 3)" in done.stderr
