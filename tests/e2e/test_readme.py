"""The README's commands, run in order as a newcomer would; the first of them is the demo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from placement.planfile import load_plan
from tests.cluster.running_cli import moetis
from tests.e2e.running import ROOT, own_environment
from tests.placement.foreign import HIDDEN, routing, slots_of, token_record, write_dump

pytestmark = pytest.mark.long


def _commands() -> list[str]:
    section = (ROOT / "README.md").read_text().split("## Use it")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block.group(1).strip().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.fixture(scope="module")
def output(folder: Path) -> dict[str, str]:
    """What each command printed, by its verb; the last of two with the same verb counts."""
    environment = own_environment(folder)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    printed = {}
    for line in _commands():
        wanted = line + " --json" if line.startswith("moetis demo") else line
        done = subprocess.run(
            ["bash", "-c", wanted],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        verb = line.split("moetis ")[1].split()[0]
        printed[verb] = done.stdout
    return printed


@pytest.fixture(scope="module")
def demo(output: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output["demo"])
    return found


def test_every_text_is_the_plain_models_before_during_and_after(demo: dict[str, Any]) -> None:
    assert demo["texts"]["wrong"] == []
    assert demo["texts"]["tokens_checked"] >= 100 * 36
    answers = {phase: figures["answers"] for phase, figures in demo["served"].items()}
    assert answers["before"] == answers["after"] == 100
    assert answers["during"] >= 100


def test_held_out_requests_visit_fewer_other_nodes_afterwards(demo: dict[str, Any]) -> None:
    assert demo["held_out"]["after"]["nodes_visited"] < demo["held_out"]["before"]["nodes_visited"]
    assert demo["held_out"]["before"]["num_requests"] == 50


def test_experts_really_moved(demo: dict[str, Any]) -> None:
    assert demo["rebalance"]["decision"] == "applied"
    assert demo["rebalance"]["moves"] > 0
    assert demo["rebalance"]["epoch"] == 1


def test_the_demo_report_stands_on_its_own(demo: dict[str, Any], folder: Path) -> None:
    page = (folder / demo["report"]).read_text()
    assert "Moetis demo" in page
    assert "cache hit rate" in page
    assert len(page) < 6_000_000


def test_the_plan_from_the_demos_trace_is_for_its_four_ranks(output: dict[str, str], folder: Path) -> None:
    assert "other nodes visited" in output["plan"]
    assert load_plan(folder / "plan.json").placement.num_ranks == 4


def test_routed_homes_are_evaluated(output: dict[str, str], folder: Path) -> None:
    assert json.loads(output["evaluate"])["homes"] == "homes.npy"


def test_the_report_is_written_where_it_says(output: dict[str, str], folder: Path) -> None:
    assert (folder / output["report"].strip()).read_text().startswith("<!DOCTYPE html>")


def test_the_lines_for_sglang_make_a_file_that_it_takes(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().split("## From the engine that you run")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    slots, dumps = slots_of(), tmp_path / "dumps"
    dumps.mkdir()
    record = token_record(routing(80), slots, positions=[*range(20)] * 4, lens=[20] * 4)
    write_dump(dumps / "expert_distribution_recorder_1.0_0.pt", [record], slots)
    for line in block.group(1).strip().splitlines():
        done = moetis(*line.split()[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    found = json.loads((tmp_path / "experts.json").read_text())
    assert list(found) == ["physical_to_logical_map"]
    rows = found["physical_to_logical_map"]
    assert [len(row) for row in rows] == [20] * HIDDEN
    assert all(set(row) == set(range(16)) for row in rows)


def test_serve_answers_the_piped_request(output: dict[str, str]) -> None:
    (answer,) = [json.loads(line) for line in output["serve"].splitlines()]
    assert (answer["id"], answer["end"], answer["tokens"]) == ("a", "finished", 16)
