"""Counts alone, from every place that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.sources import read_source
from placement.counts import Counts
from placement.errors import TraceError
from placement.interchange.pieces import Hints
from tests.placement.foreign import (
    DENSE,
    HIDDEN,
    physical_count,
    routing,
    slots_of,
    to_physical,
    write_dump,
    write_stat,
    write_statistics,
)

COUNT = np.arange(24).reshape(3, 8) + 1


def _read(path: Path, key: str | None = None) -> Counts:
    found = read_source(str(path), Hints(counts_key=key))
    assert isinstance(found, Counts)
    return found


def _logical(chosen: Any) -> Any:
    return np.stack([np.bincount(chosen[:, layer].ravel(), minlength=16) for layer in range(chosen.shape[1])])


def test_a_stat_dump_is_summed_over_its_buffer_and_dense_layers_are_left_out(tmp_path: Path) -> None:
    count = np.zeros((5, HIDDEN, 8), np.int32)
    count[:2, DENSE:] = COUNT
    found = _read(write_stat(tmp_path / "expert_distribution_recorder_1.0.pt", count))
    assert found.load.tolist() == (2 * COUNT).tolist()
    assert found.layers is not None
    assert (found.layers.moe, found.layers.num_hidden) == ((1, 2, 3), HIDDEN)


def test_per_pass_dumps_of_all_ranks_are_summed_and_mapped_back(tmp_path: Path) -> None:
    chosen, slots = routing(20), slots_of()
    for rank in (0, 1):
        part = physical_count(to_physical(chosen[10 * rank : 10 * rank + 10], slots), slots.shape[1])
        record = {"forward_pass_id": 1, "rank": rank, "gatherer_key": "primary", "global_physical_count": part.tolist()}
        write_dump(tmp_path / f"expert_distribution_recorder_1.0_{rank}.pt", [record], slots)
    assert _read(tmp_path).load.tolist() == _logical(chosen).tolist()


def test_statistics_of_tensorrt_llm_are_summed_over_ranks_and_iterations(tmp_path: Path) -> None:
    count = np.random.default_rng(0).integers(0, 9, (2, 3, 3, 8))
    found = _read(write_statistics(tmp_path / "stat", count))
    assert found.load.tolist() == count.sum(axis=(0, 1)).tolist()
    assert found.layers is not None
    assert found.layers.moe == (1, 2, 3)


def _write(path: Path, value: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, value)
    elif path.suffix == ".npz":
        np.savez(path, counts=value)
    elif path.suffix == ".json":
        path.write_text(json.dumps({"counts": value.tolist()}))
    else:
        path.write_text("\n".join(",".join(map(str, row)) for row in value.tolist()))
    return path


@pytest.mark.parametrize("name", ["c.npy", "c.npz", "c.json", "c.csv"])
def test_a_table_of_counts_is_read_from_every_kind_of_file(tmp_path: Path, name: str) -> None:
    assert _read(_write(tmp_path / name, COUNT)).load.tolist() == COUNT.tolist()


@pytest.mark.parametrize("name", ["c.npy", "c.npz", "c.json"])
def test_steps_are_summed(tmp_path: Path, name: str) -> None:
    assert _read(_write(tmp_path / name, np.stack([COUNT, COUNT]))).load.tolist() == (2 * COUNT).tolist()


def test_a_bare_json_table_and_a_csv_with_names_will_do(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(COUNT.tolist()))
    (tmp_path / "c.csv").write_text("e0,e1\n1,2\n3,4\n")
    assert _read(tmp_path / "c.json").load.tolist() == COUNT.tolist()
    assert _read(tmp_path / "c.csv").load.tolist() == [[1, 2], [3, 4]]


def test_a_csv_of_steps_layers_and_experts_is_summed(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("step,layer,expert,count\n0,0,0,5\n0,1,1,2\n1,0,0,1\n")
    assert _read(tmp_path / "c.csv").load.tolist() == [[6, 0], [0, 2]]


BAD: dict[str, tuple[str, str]] = {
    "words.csv": ("1,2\n3,x\n", "layer 1, expert 1: 'x' is not a number"),
    "ragged.csv": ("1,2\n3\n", "layer 1 has 1 columns, layer 0 has 2"),
    "empty.csv": ("", "is empty"),
    "head.csv": ("a,b\n", "a header and no line"),
    "nan.csv": ("1,nan\n", "layer 0, expert 1 has a count of nan"),
    "long.csv": ("layer,expert,count\n0,0,-1\n", "line 2: a count of -1"),
    "huge.csv": ("layer,expert,count\n99999999999,0,1\n", "line 2: needs layer, expert, count"),
    "ragged.json": ("[[1,2],[3]]", "its rows differ in length"),
    "words.json": ('[["a"]]', "must hold numbers"),
    "flat.json": ("[1,2]", "got (2,)"),
    "none.json": ('{"other": 1}', "key 'counts' is missing; found other"),
    "broken.json": ("{", "not JSON"),
    "deep.json": ("[" * 5000, "not JSON"),
    "steps.json": ("[[[1,2]],[[1,-2]]]", "step 1, layer 0, expert 1 has a count of -2"),
    "text.txt": ("hello", "not a known kind of file"),
    "x.jsonl": ('{"a": 1}\n', "neither a router trace"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_is_wrong_with_counts_is_said_with_file_and_place(tmp_path: Path, name: str) -> None:
    content, said = BAD[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError) as caught:
        read_source(str(tmp_path / name))
    assert said in str(caught.value)
    assert name in str(caught.value)
