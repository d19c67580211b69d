"""simulate, screen, and evaluate of many plans, as their users run them; and what they say to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli import app
from placement.baselines import linear_placement
from placement.errors import InputError
from placement.planfile import Plan, plan_to_json
from placement.topology import load_topology
from tests.cluster.running_cli import moetis, write_trace

QUICK = ("--effort", "0.02", "--slots", "1,2", "--decode-batch", "4", "--prefill-batch", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whatif")


@pytest.fixture(scope="module")
def trace(folder: Path) -> Path:
    return write_trace(folder / "trace.npz", requests=40)


def test_simulate_sweeps_models_and_clusters_and_draws_a_page(folder: Path, trace: Path) -> None:
    hostile = write_trace(folder / "<img src=x onerror=alert(1)>.npz", layers=3)
    page = folder / "chart.html"
    done = moetis(
        *("simulate", str(trace), str(hostile), "--topology", "2x2", "--topology", "1250x8", *QUICK),
        *("--drift", "3", "--every", "0,1", "--shares", "3,1", "--out", str(page), "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(one["model"], one["topology"]) for one in found["simulated"]][:2] == [
        ("trace", "2x2"),
        ("trace", "1250x8"),
    ]
    assert max(point["num_gpus"] for one in found["simulated"] for point in one["points"]) == 10_000
    assert any(point["pareto"] for point in found["simulated"][0]["points"])
    assert found["simulated"][0]["memory"][0]["step_over_first"] == 1.0
    assert found["all_models"][0]["expert_gb"] == pytest.approx(
        sum(one["points"][0]["expert_gb"] for one in found["simulated"] if one["topology"] == "2x2")
    )
    assert {row["policy"] for row in found["drift"]["summary"]} >= {"one plan for ever", "a plan every window"}
    assert any("groups of 8 GPUs" in line for line in found["approximations"])
    text = page.read_text()
    assert "<img src=x" not in text
    assert len(text) < 6_000_000


def test_simulate_prints_tables_for_people(trace: Path) -> None:
    done = moetis("simulate", str(trace), "--topology", "2x2", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "how much memory buys how much" in done.stdout


def test_screen_answers_first_and_gives_its_reasons(trace: Path) -> None:
    done = moetis("screen", str(trace), "--topology", "2x2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cannot tell yet")
    assert "record more" in done.stdout
    assert "for want of a better guess" in " ".join(done.stdout.split())


def test_evaluate_sets_plans_from_files_side_by_side(folder: Path, trace: Path) -> None:
    plans = [folder / name for name in ("one.json", "two.json")]
    for path, rows in zip(plans, (2, 3), strict=True):
        plan = Plan(placement=linear_placement(2, 8, 4, rows), topology=load_topology("2x2"), measured={})
        path.write_text(plan_to_json(plan))
    arguments = ("evaluate", str(plans[0]), str(trace), "--current", str(plans[0]), "--with", str(plans[1]))
    done = moetis(*arguments, "--with", str(plans[1]), "--baseline", "linear", "--gpu-share", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["baselines"]) == ["present", "two", "two-2", "linear"]
    assert found["plan_over_baseline"]["present"]["decode_step"]["ratio"] == 1.0
    assert found["plan"]["decode"]["hit_rate"] < 1
    assert found["plan"]["intervals"]["nodes_visited"][0] <= found["plan"]["nodes_visited"]
    table = moetis(*arguments)
    assert "decode step" in table.stdout and "prefill step" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--topology", "2x2", "--slots", "x"), "--slots 'x': write numbers with commas"),
        (("--topology", "2x2", "--slots", "0.5"), "from 1 x experts upwards"),
        (("--topology", "2x2", "--decode-batch", "1.5"), "write whole numbers"),
        (("--topology", "2x2", "--planner", "best"), "planner 'best'"),
        (("--topology", "2x2", "--topology", "2x2"), "topology '2x2' is given twice"),
        (("--topology", "2x2", "--group-gpus", "3"), "must divide the 4 GPUs"),
        (("--topology", "2x2", "--model", "a", "--model", "b"), "give one for each of the 1 traces"),
        (("--topology", "2x2", "--model", "nothing"), "--model 'nothing': neither a readable config.json"),
        (("--topology", "2x2", "--shares", "1,2"), "for each of the 1 traces"),
        (("--topology", "2x2", "--drift", "1"), "2 windows or more"),
    ],
)
def test_bad_input_is_named_before_any_work_is_done(trace: Path, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError) as caught:
        app(["simulate", str(trace), *arguments], standalone_mode=False)
    assert said in str(caught.value)
