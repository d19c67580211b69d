"""`moetis import` and `export`, and engine files given to the other commands directly.

Commands run in this process, but for the one line each that the README promises: a process a case would take minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from cluster.cli import app
from cluster.sources import read_trace
from placement.errors import InputError
from placement.planfile import load_plan
from tests.cluster.running_cli import moetis
from tests.placement.foreign import HIDDEN, own_npz, routing, slots_of, token_record, with_dense, write_dump, write_stat


def here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in this process, with the exit status that `cluster.cli.main` gives it."""
    out, log = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
        try:
            app(list(arguments), standalone_mode=False)
        except InputError as error:
            status = 2
            print(error, file=log)
    return subprocess.CompletedProcess(list(arguments), status, out.getvalue(), log.getvalue())


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """per_token dumps of two ranks, six requests each."""
    folder, slots = tmp_path_factory.mktemp("dumps"), slots_of()
    for rank in (0, 1):
        records = [
            token_record(
                routing(40, seed=10 * rank + number), slots, positions=[*range(20)] * 2, lens=[20, 20], rank=rank
            )
            | {"forward_pass_id": number}
            for number in range(3)
        ]
        write_dump(folder / f"expert_distribution_recorder_1.0_{rank}.pt", records, slots)
    return folder


@pytest.fixture(scope="module")
def plan(dumps: Path) -> Path:
    path = dumps.parent / "plan.json"
    done = moetis("plan", str(dumps), "--topology", "2x2", "--slots-per-rank", "5", "--out", str(path))
    assert done.returncode == 0, done.stderr
    return path


def test_a_plan_from_sglangs_dumps_is_a_file_that_sglang_takes(plan: Path) -> None:
    out = plan.with_name("experts.json")
    done = moetis("export", str(plan), "--to", "sglang", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["redundant_experts"] == 4
    rows = np.array(json.loads(out.read_text())["physical_to_logical_map"])
    assert rows.shape == (HIDDEN, 20)
    assert rows[1:].tolist() == load_plan(plan).placement.physical_to_logical.tolist()
    assert all(set(row) == set(range(16)) for row in rows.tolist())


@pytest.mark.parametrize("engine", ["vllm", "ascend", "tensorrt-llm", "eplb"])
def test_every_engine_has_its_export_and_is_told_what_to_do_with_it(plan: Path, engine: str) -> None:
    out = plan.with_name(f"{engine}.out")
    done = here("export", str(plan), "--to", engine, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout
    assert out.stat().st_size > 100


def test_import_writes_a_trace_that_reads_back_the_same_and_says_what_it_lacks(dumps: Path) -> None:
    out = dumps.parent / "trace"
    done = here("import", str(dumps), "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["format"], found["tokens_kept"], found["experts"], found["top_k"]) == ("sglang", 240, 16, 4)
    assert found["layers"] == {"moe": [1, 2, 3], "hidden": HIDDEN}
    direct, again = read_trace(str(dumps)), read_trace(str(out))
    for name in ("experts", "request", "position", "step", "source_rank", "phase", "token_id"):
        assert getattr(direct, name).tolist() == getattr(again, name).tolist()
    assert direct.layers == again.layers


def test_a_trace_that_is_imported_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    source = own_npz(tmp_path / "t.npz", routing(50))
    for origin, out in ((source, "a"), (tmp_path / "a", "b")):
        assert here("import", str(origin), "--out", str(tmp_path / out)).returncode == 0
    name = "part-00000000.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_import_from_one_rank_alone_has_no_homes(tmp_path: Path) -> None:
    slots = slots_of()
    write_dump(tmp_path / "d.pt", [token_record(routing(4), slots, positions=[0, 1, 0, 1], lens=[2, 2])], slots)
    done = here("import", str(tmp_path / "d.pt"), "--out", str(tmp_path / "out"))
    assert "homes are unknown: rank 0 alone" in done.stderr
    assert read_trace(str(tmp_path / "out")).source_rank.tolist() == [-1] * 4


def test_import_of_counts_keeps_them_and_their_layers(tmp_path: Path) -> None:
    count = np.zeros((2, 4, 8), np.int32)
    count[:, 1:] = np.arange(8) + 1
    done = here("import", str(write_stat(tmp_path / "s.pt", count)), "--out", str(tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    assert "not in this source: tokens" in done.stderr
    plan = tmp_path / "p.json"
    done = here("plan", str(tmp_path / "c"), "--topology", "2x2", "--slots-per-rank", "3", "--out", str(plan))
    assert done.returncode == 0, done.stderr
    assert load_plan(plan).measured["layers"] == {"moe": [1, 2, 3], "hidden": 4}


def test_layers_without_load_are_dense_for_the_engine(tmp_path: Path) -> None:
    count = np.arange(24.0).reshape(3, 8)
    count[0] = 0
    np.save(tmp_path / "c.npy", count)
    plan, out = tmp_path / "p.json", tmp_path / "out.json"
    done = here("plan", str(tmp_path / "c.npy"), "--topology", "2x2", "--slots-per-rank", "3", "--out", str(plan))
    assert done.returncode == 0, done.stderr
    done = here("export", str(plan), "--to", "sglang", "--out", str(out))
    assert "layers without any load are dense: 0" in done.stderr
    assert json.loads(out.read_text())["physical_to_logical_map"][0] == [*range(8), 0, 1, 2, 3]
    here("export", str(plan), "--to", "tensorrt-llm", "--out", str(out))
    assert list(yaml.safe_load(out.read_text())["initial_global_assignments"]) == [1, 2]


def test_early_segments_learn_the_experts_that_come_late(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", with_dense(routing(50, experts=8)))
    np.save(tmp_path / "b.npy", with_dense(routing(50, experts=16)))
    (tmp_path / "in").mkdir()
    for name in ("a.npy", "b.npy"):
        (tmp_path / name).rename(tmp_path / "in" / name)
    done = here("import", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--json")
    assert json.loads(done.stdout)["experts"] == 16
    assert read_trace(str(tmp_path / "out")).num_experts == 16


def _bad(folder: Path) -> dict[str, tuple[list[str], str]]:
    source = str(own_npz(folder / "t.npz", routing(8)))
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "x").write_text("x")
    np.save(folder / "all_dense.npy", np.zeros((5, 2, 4), np.uint8))
    new = ["--out", str(folder / "new")]
    return {
        "missing": (["import", "nowhere", *new], "no such file"),
        "full folder": (["import", source, "--out", str(folder / "full")], "not an empty folder"),
        "no parent": (["import", source, "--out", str(folder / "a" / "b")], "does not exist"),
        "format": (["import", source, *new, "--format", "x"], "is one of moetis, npz"),
        "sample": (["import", source, *new, "--sample", "200%"], "--sample '200%'"),
        "layers": (["import", source, *new, "--moe-layers", "5-3"], "--moe-layers '5-3'"),
        "nothing left": (["import", str(folder / "all_dense.npy"), *new], "nothing is left"),
        "suffix": (["export", "{plan}", "--to", "sglang", *new], "ends in .json"),
        "ranks": (["export", "{plan}", "--to", "eplb", *new, "--ep-size", "3"], "the nearest that do: 18 and 21"),
        "plan's layers": (["export", "{plan}", "--to", "eplb", *new, "--moe-layers", "0-3"], "the plan has 3"),
        "hidden": (["export", "{plan}", "--to", "eplb", *new, "--hidden-layers", "2"], "give 4 or more"),
        "no plan": (["export", source, "--to", "eplb", *new], "cannot be read"),
    }


NAMES = (
    *("missing", "full folder", "no parent", "format", "sample", "layers", "nothing left", "suffix"),
    *("ranks", "plan's layers", "hidden", "no plan"),
)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_clear_sentence_and_leaves_nothing_behind(tmp_path: Path, plan: Path, name: str) -> None:
    arguments, said = _bad(tmp_path)[name]
    before = sorted(tmp_path.rglob("*"))
    done = here(*(text.format(plan=plan) for text in arguments))
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
