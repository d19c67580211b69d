"""`moetis report` in all its forms, and what it says of past plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from cluster import history as states
from cluster.cli_report import report_commands
from cluster.history import History
from cluster.promises import past_epochs
from placement.baselines import linear_placement
from placement.errors import ConfigError
from placement.planfile import Plan, load_plan, plan_to_json
from placement.topology import load_topology
from placement.trace import segment_bytes
from tests.placement.report_case import case_measured, case_placements, case_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trace.safetensors, before.json, plan.json, counts.npz."""
    folder = tmp_path_factory.mktemp("reporting")
    (folder / "trace.safetensors").write_bytes(segment_bytes(case_trace()))
    for name, placement in zip(("before", "plan"), case_placements(), strict=True):
        plan = Plan(placement=placement, topology=load_topology("2x2"), measured=case_measured())
        (folder / f"{name}.json").write_text(plan_to_json(plan))
    np.savez(folder / "counts.npz", counts=np.arange(16.0).reshape(2, 8))
    return folder


def _report(folder: Path, *arguments: str, trace: str = "trace.safetensors") -> Result:
    return CliRunner().invoke(report_commands, [str(folder / "plan.json"), str(folder / trace), *arguments])


@pytest.mark.parametrize(
    ("name", "begins"),
    [("r.html", "<!DOCTYPE html>"), ("r.md", "# Moetis"), ("r.json", '{"format"'), ("r.txt", "Moetis placement")],
)
def test_a_files_name_says_which_form_it_gets(folder: Path, name: str, begins: str) -> None:
    done = _report(folder, "--out", str(folder / name))
    assert done.exception is None
    assert done.stdout.split() == [str(folder / name)]
    assert (folder / name).read_text().startswith(begins)


def test_without_a_file_a_form_goes_to_stdout(folder: Path) -> None:
    done = _report(folder, "--format", "json", "--expert-bytes", "1000", "--current", str(folder / "before.json"))
    found = json.loads(done.stdout)
    assert found["format"] == "moetis-report/2"
    assert all(step["num_bytes"] == 1000 * step["moves"] for step in found["rounds"])


def test_a_models_name_gives_its_sizes_and_a_size_given_goes_before(folder: Path) -> None:
    done = _report(folder, "--format", "json", "--model", "mixtral-8x7b", "--token-bytes", "10")
    found = json.loads(done.stdout)["sizes"]
    assert found == {"expert_bytes": 352_321_536, "token_bytes": 10, "origin": "sizes of mixtral-8x7b"}


def test_a_chat_text_comes_beside_a_file(folder: Path) -> None:
    done = _report(folder, "--chat", "--out", str(folder / "beside.md"))
    assert str(folder / "beside.md") in done.stdout
    assert "Apply: on requests that the plan has not seen" in done.stdout


def test_counts_alone_can_be_reported_on(folder: Path) -> None:
    done = _report(folder, "--format", "markdown", trace="counts.npz")
    assert "Load and memory of the ranks" in done.stdout
    assert "Topology and traffic" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to write: give --out FILE, --format, or --chat"),
        (["--out", "report.pdf"], "ends in none of .html"),
        (["--chat", "--history", "nowhere.sqlite"], "--history 'nowhere.sqlite': no such file"),
        (["--chat", "--part", "part.json"], "no part of this plan"),
    ],
)
def test_what_can_not_be_done_is_said(folder: Path, arguments: list[str], says: str) -> None:
    done = _report(folder, *arguments)
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)


def test_a_part_is_written_as_a_plan(folder: Path) -> None:
    """Layer 0 swaps two ranks of a node, which saves nothing; layer 1 brings the experts of a token to one node."""
    before = linear_placement(2, 8, 4, 2)
    table = before.physical_to_logical.copy()
    table[0] = [2, 3, 0, 1, 6, 7, 4, 5]
    table[1] = [0, 3, 1, 4, 2, 5, 6, 7]
    for name, placement in (("present", before), ("split", replace(before, epoch=1, physical_to_logical=table))):
        plan = Plan(placement=placement, topology=load_topology("2x2"), measured=case_measured())
        (folder / f"{name}.json").write_text(plan_to_json(plan))
    done = CliRunner().invoke(
        report_commands,
        [
            *(str(folder / "split.json"), str(folder / "trace.safetensors"), "--current", str(folder / "present.json")),
            *("--chat", "--part", str(folder / "part.json")),
        ],
    )
    assert done.exception is None, done.exception
    assert "Apply partly: layer 1 brings" in done.stdout
    part = load_plan(folder / "part.json").placement.physical_to_logical
    assert part.tolist() == [before.physical_to_logical[0].tolist(), table[1].tolist()]


def _plan(epoch: int, before: float, after: float) -> Plan:
    measured = {"before": {"nodes_visited": before}, "after": {"nodes_visited": after}}
    placement = linear_placement(1, 4, 2, 2).with_epoch(epoch)
    return Plan(placement=placement, topology=load_topology("1x2"), measured=measured)


def test_what_a_plan_did_is_what_the_next_one_found(tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    initial = Plan(placement=linear_placement(1, 4, 2, 2), topology=load_topology("1x2"), measured={})
    history.add(initial, states.DONE, {"reason": "initial placement"})
    history.add(_plan(1, 2.0, 1.5))
    history.advance(1, states.SERVING)
    history.advance(1, states.DONE)
    history.add(_plan(2, 1.4, 1.39), states.LEFT, {"reason": "too little"})
    history.add(_plan(3, 1.45, 1.0))
    history.advance(3, states.ABORTED, {"reason": "a rank does not answer"})
    found = past_epochs(tmp_path / "h.sqlite")
    assert [(epoch.state, epoch.found, epoch.verdict) for epoch in found] == [
        ("served", 2.0, "not known yet"),
        ("served", 1.4, "kept"),
        ("left", None, "not known yet"),
        ("aborted", None, "not known yet"),
    ]
    assert found[3].reason == "a rank does not answer"


def test_what_was_measured_of_a_plan_counts_before_all_else(tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    history.add(_plan(1, 2.0, 1.0), states.DONE)
    effect = {"after": {"nodes_visited": 1.5}, "before": {"nodes_visited": 3.0}, "after_over_before": None}
    history.advance(1, "measured", effect)
    (found,) = past_epochs(tmp_path / "h.sqlite")
    # Traffic visits more nodes than it did, but half of them were saved, as promised.
    assert (found.state, found.found, found.found_before, found.verdict) == ("served", 1.5, 3.0, "kept")


def test_a_file_that_is_no_history_is_refused(tmp_path: Path) -> None:
    (tmp_path / "h.sqlite").write_text("nonsense " * 100)
    with pytest.raises(ConfigError, match="move it away"):
        past_epochs(tmp_path / "h.sqlite")
