"""`plan` and `evaluate` on counts alone, and `slots`, as their users run them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from placement.planfile import load_plan
from tests.cluster.running_cli import moetis, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("slots") / "trace.npz")


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts under two names; the first layer is dense."""
    load = np.arange(24, dtype=np.float64).reshape(3, 8) ** 2
    load[0] = 0
    path = tmp_path_factory.mktemp("counts") / "counts.npz"
    np.savez(path, counts=load, monday=load[:, ::-1])
    return path


@pytest.fixture(scope="module")
def counts_plan(counts: Path) -> Path:
    path = counts.with_name("plan.json")
    done = moetis("plan", str(counts), "--topology", "2x2", "--slots-per-rank", "3", "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert "used together is unknown" in " ".join(done.stdout.split())
    return path


def test_a_plan_from_counts_alone_levels_the_load_and_says_what_it_does_not_know(counts_plan: Path) -> None:
    made = load_plan(counts_plan)
    assert made.measured["after"]["load_max_over_mean"] < made.measured["before"]["load_max_over_mean"]
    assert "used together is unknown" in made.measured["says"]
    assert "nodes_visited" not in made.measured["after"]


def test_a_dense_layer_keeps_its_experts_in_id_order(counts_plan: Path) -> None:
    assert load_plan(counts_plan).placement.physical_to_logical[0].tolist() == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0]


def test_evaluate_on_counts_gives_the_balance_alone(counts_plan: Path, counts: Path) -> None:
    done = moetis(
        *("evaluate", str(counts_plan), str(counts), "--counts-key", "monday"),
        *("--baseline", "eplb", "--baseline", "random", "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["plan"]) == {"load_max_over_mean", "node_load_max_over_mean"}
    assert set(found["baselines"]) == {"eplb", "random"}
    assert "'monday'" in found["judged_on"]


def test_baselines_can_be_fitted_on_what_the_plan_was_fitted_on(counts_plan: Path, counts: Path) -> None:
    judged = (str(counts_plan), str(counts), "--counts-key", "monday", "--baseline", "eplb", "--json")
    same = json.loads(moetis("evaluate", *judged).stdout)
    other = json.loads(moetis("evaluate", *judged, "--fit", str(counts), "--fit-key", "counts").stdout)
    assert other["fitted_on"].endswith("key 'counts'")
    worse = (found["baselines"]["eplb"]["load_max_over_mean"] for found in (other, same))
    assert next(worse) > next(worse)


def test_slots_finds_the_fewest_for_a_goal(trace: Path) -> None:
    done = moetis("slots", str(trace), "--topology", "2x2", "--from", "1", "--to", "4", "--goal", "95%", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [point["num_slots"] for point in found["curve"]] == [8, 12, 16, 20, 24, 28, 32]
    assert found["curve"][0]["saved"] == 0
    assert found["fewest"]["saved"] >= found["goal"] == 0.95
    assert all(point["saved"] < 0.95 for point in found["curve"] if point["num_slots"] < found["fewest"]["num_slots"])


def test_a_goal_that_no_point_reaches_is_said(trace: Path) -> None:
    done = moetis("slots", str(trace), "--topology", "2x2", "--to", "1", "--goal", "30%")
    assert done.returncode == 0, done.stderr
    assert "no point saves 30%" in " ".join(done.stdout.split())
