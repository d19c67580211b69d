"""The offline commands as their users run them, and what they say to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from placement.planfile import load_plan
from tests.cluster.running_cli import ROOT, moetis, write_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def trace(folder: Path) -> Path:
    return write_trace(folder / "trace.npz")


@pytest.fixture(scope="module")
def plan(folder: Path, trace: Path) -> Path:
    path = folder / "plan.json"
    done = moetis("plan", str(trace), "--topology", "2x2", "--slots-per-rank", "2", "--out", str(path))
    assert done.returncode == 0, done.stderr
    return path


def test_a_plan_has_every_expert_once_where_there_is_no_spare_slot(plan: Path) -> None:
    placement = load_plan(plan).placement
    assert np.sort(placement.physical_to_logical, axis=1).tolist() == [list(range(8))] * 2


def test_evaluate_compares_with_baselines_on_the_same_requests(plan: Path, trace: Path) -> None:
    done = moetis("evaluate", str(plan), str(trace), "--baseline", "eplb", "--baseline", "linear", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["baselines"]) == {"eplb", "linear"}
    assert found["plan"]["num_requests"] == 6
    ratio = found["plan"]["nodes_visited"] / found["baselines"]["eplb"]["nodes_visited"]
    assert found["plan_over_baseline"]["eplb"]["nodes_visited"] == pytest.approx(ratio)


def test_homes_are_one_rank_a_request_and_can_be_evaluated_with(plan: Path, trace: Path, folder: Path) -> None:
    out = folder / "homes.npy"
    assert moetis("homes", str(plan), str(trace), "--prefix", "8", "--out", str(out)).returncode == 0
    ranks = np.load(out)
    assert ranks.shape == (12,)
    assert set(ranks.tolist()) <= {0, 1, 2, 3}
    routed = moetis("evaluate", str(plan), str(trace), "--homes", str(out), "--json")
    random = moetis("evaluate", str(plan), str(trace), "--homes", "random", "--json")
    visits = [json.loads(done.stdout)["plan"]["nodes_visited"] for done in (routed, random)]
    assert visits[0] < visits[1]


def test_homes_look_at_the_first_tokens_alone(plan: Path, trace: Path, folder: Path) -> None:
    with np.load(trace) as archive:
        arrays = {name: archive[name] for name in archive.files}
    late = arrays["position"] >= 8
    arrays["experts"][late] = arrays["experts"][late][::-1]
    np.savez(folder / "other.npz", **arrays)
    for source, out in (("trace.npz", "a.npy"), ("other.npz", "b.npy")):
        done = moetis("homes", str(plan), str(folder / source), "--prefix", "8", "--out", str(folder / out))
        assert done.returncode == 0, done.stderr
    assert (folder / "a.npy").read_bytes() == (folder / "b.npy").read_bytes()


def test_a_plan_from_a_present_one_goes_on_with_its_epoch(plan: Path, trace: Path, folder: Path) -> None:
    out = folder / "next.json"
    done = moetis(
        *("plan", str(trace), "--topology", "2x2", "--slots-per-rank", "2"),
        *("--current", str(plan), "--out", str(out), "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert load_plan(out).placement.epoch == load_plan(plan).placement.epoch + 1
    assert json.loads(done.stdout)["plan"] == str(out)


def test_a_plan_for_unlike_gpus_and_a_known_model_says_what_was_fastest(trace: Path, folder: Path) -> None:
    done = moetis(
        "plan", str(trace), "--topology", "2x2", "--slots-per-rank", "4,4,3,3", "--model", "mixtral-8x7b",
        "--out", str(folder / "unlike.json"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tradeoff"]["balance_price"] in (0.4, 1.0, 2.5)
    rows = np.array(json.loads((folder / "unlike.json").read_text())["physical_to_logical"]).reshape(-1, 4, 4)
    assert (rows[:, 2:, 3] == -1).all()


def test_report_writes_a_page(plan: Path, trace: Path, folder: Path) -> None:
    done = moetis("report", str(plan), str(trace), "--out", str(folder / "r.html"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / "r.html")
    assert (folder / "r.html").read_text().startswith("<!DOCTYPE html>")


def test_help_names_every_command_and_starts_no_ray() -> None:
    heavy = ("ray", "torch", "plotly")
    code = f"import sys; from cluster.cli import app; print(sorted(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    text = moetis("--help").stdout
    for name in ("plan", "slots", "evaluate", "homes", "report", "demo", "serve", "rebalance"):
        assert name in text


def test_commands_beside_a_running_cluster_start_without_torch() -> None:
    code = "import sys, cluster.rebalance, cluster.scale, cluster.history_view; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def _bad(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Name -> arguments, and what must be said. {trace} and {plan} are good ones."""
    (folder / "empty.npz").write_bytes(b"")
    (folder / "text.json").write_text("nonsense")
    (folder / "bad.yaml").write_text("name: x\nlevels: 3\nfanout: [1]\n")
    write_trace(folder / "model.npz", layers=3)
    write_trace(folder / "one.npz", requests=1)
    np.savez(folder / "other_keys.npz", monday=np.ones((2, 8)))
    np.savez(folder / "wrong.npz", counts=np.array([[1.0, np.nan]]), flat=np.ones(3))
    np.savez(folder / "zero.npz", counts=np.zeros((2, 8)))
    np.savez(folder / "words.npz", counts=np.array([["a", "b"]]))
    np.savez(folder / "small.npz", counts=np.ones((2, 4)))
    np.save(folder / "short.npy", np.zeros(3, np.int32))
    (folder / "nothing").mkdir(exist_ok=True)
    out = ["--out", str(folder / "never")]
    plan = ["plan", "{trace}", "--topology", "2x2", "--slots-per-rank", "2"]
    return {
        "no trace": (["plan", "nowhere.npz", *plan[2:], *out], "trace 'nowhere.npz': no such file"),
        "empty file": (["plan", str(folder / "empty.npz"), *plan[2:], *out], "not a readable .npz"),
        "empty folder": (["plan", str(folder / "nothing"), *plan[2:], *out], "has no *.safetensors segment"),
        "one request": (["plan", str(folder / "one.npz"), *plan[2:], *out], "one request only"),
        "few slots": ([*plan[:4], "--slots-per-rank", "1", *out], "4 ranks x 1 slots per rank = 4 slots"),
        "slots list": ([*plan[:4], "--slots-per-rank", "2,2", *out], "4 numbers from 1 up, got [2, 2]"),
        "slots words": ([*plan[:4], "--slots-per-rank", "two", *out], "--slots-per-rank 'two'"),
        "groups": ([*plan, "--keep-groups", "3", *out], "8 experts do not divide into 3 groups"),
        "model": ([*plan, "--model", "nothing-9b", *out], "nothing-9b"),
        "no slots": ([*plan[:4], "--slots-per-rank", "0", *out], "--slots-per-rank"),
        "topology": ([*plan[:2], "--topology", str(folder / "bad.yaml"), *plan[4:], *out], "key 'levels'"),
        "no topology": ([*plan[:2], "--topology", "2by2", *plan[4:], *out], "not a shorthand"),
        "no folder": ([*plan, "--out", str(folder / "none" / "p.json")], "does not exist"),
        "a folder": ([*plan, "--out", str(folder)], "is a folder"),
        "current": (
            [*plan[:4], "--slots-per-rank", "3", "--current", "{plan}", *out],
            "--current has 4 ranks x 2 slots",
        ),
        "no plan": (["evaluate", "nowhere.json", "{trace}"], "plan 'nowhere.json': cannot be read"),
        "not a plan": (["evaluate", str(folder / "text.json"), "{trace}"], "text.json"),
        "other model": (["evaluate", "{plan}", str(folder / "model.npz")], "another model"),
        "baseline": (["evaluate", "{plan}", "{trace}", "--baseline", "best"], "best"),
        "homes": (["evaluate", "{plan}", "{trace}", "--homes", str(folder / "short.npy")], "has 3 requests"),
        "prefix": (["homes", "{plan}", "{trace}", "--prefix", "0", *out], "--prefix"),
        "report": (["report", "{plan}", str(folder / "model.npz"), "--chat"], "another model"),
        "counts missing": (["plan", str(folder / "other_keys.npz"), *plan[2:], *out], "name one of its keys"),
        "counts key": (["plan", str(folder / "wrong.npz"), *plan[2:], "--counts-key", "x", *out], "found counts, flat"),
        "counts shape": (["plan", str(folder / "wrong.npz"), *plan[2:], "--counts-key", "flat", *out], "got (3,)"),
        "counts value": (["plan", str(folder / "wrong.npz"), *plan[2:], *out], "layer 0, expert 1 has a count of nan"),
        "counts zero": (["plan", str(folder / "zero.npz"), *plan[2:], *out], "every count is 0"),
        "counts folder": (["plan", str(folder / "nothing"), *plan[2:], "--counts-key", "x", *out], "this is a folder"),
        "counts words": (["plan", str(folder / "words.npz"), *plan[2:], *out], "must hold numbers"),
        "counts other": (["evaluate", "{plan}", str(folder / "small.npz")], "another model"),
        "counts homes": (["evaluate", "{plan}", str(folder / "small.npz"), "--homes", "random"], "leave it out"),
        "goal": (["slots", "{trace}", "--topology", "2x2", "--goal", "much"], "--goal 'much'"),
        "goal of all": (["slots", "{trace}", "--topology", "2x2", "--goal", "100%"], "below 100%"),
        "range": (["slots", "{trace}", "--topology", "2x2", "--from", "2", "--to", "1"], "from 2 to 1"),
        "range below": (["slots", "{trace}", "--topology", "2x2", "--from", "0.5"], "from 0.5 to 2"),
        "range above": (["slots", "{trace}", "--topology", "2x2", "--to", "9"], "give at most 4"),
        "slots of one": (["slots", str(folder / "one.npz"), "--topology", "2x2"], "one request only"),
        "config": (["serve", "--config", str(folder / "bad.yaml")], "key 'model'"),
        "no cluster": (["rebalance", "--config", "configs/clusters/demo.yaml"], "start `moetis serve`"),
        "prompts": (["demo", "--prompts", str(folder / "text.json")], "line 1"),
    }


NAMES = (
    "no trace",
    "empty file",
    "empty folder",
    "one request",
    "few slots",
    "slots list",
    "slots words",
    "groups",
    "model",
    "no slots",
    "topology",
    "no topology",
    "no folder",
    "a folder",
    "current",
    "no plan",
    "not a plan",
    "other model",
    "baseline",
    "homes",
    "prefix",
    "report",
    "counts missing",
    "counts key",
    "counts shape",
    "counts value",
    "counts zero",
    "counts folder",
    "counts words",
    "counts other",
    "counts homes",
    "goal",
    "goal of all",
    "range",
    "range below",
    "range above",
    "slots of one",
    "config",
    "no cluster",
    "prompts",
)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_clear_sentence_and_exit_2(folder: Path, trace: Path, plan: Path, name: str) -> None:
    arguments, said = _bad(folder)[name]
    before = sorted(folder.iterdir())
    done = moetis(*(text.format(trace=trace, plan=plan) for text in arguments))
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(folder.iterdir()) == before
