"""Files of other people's machines: cut, damaged, of the wrong type, of two models, or with code in a pickle."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.sources import read_source
from cluster.torch_files import read_pt
from placement.errors import TraceError
from placement.interchange.pieces import Hints
from tests.placement.foreign import (
    HIDDEN,
    own_npz,
    router_lines,
    routing,
    sglang_response,
    slots_of,
    token_record,
    vllm_response,
    with_dense,
    write_dump,
    write_lines,
    write_stat,
    write_statistics,
)


def _npy(folder: Path) -> Path:
    np.save(folder / "a.npy", with_dense(routing(8)))
    return folder / "a.npy"


def _dump(folder: Path) -> Path:
    slots = slots_of()
    record = token_record(routing(8), slots, positions=[0, 1, 2, 3] * 2, lens=[4, 4])
    return write_dump(folder / "d.pt", [record], slots)


def _statistics(folder: Path) -> Path:
    write_statistics(folder, np.ones((1, 2, 3, 8), np.int64))
    return folder / "rank0.safetensors"


MADE: dict[str, Callable[[Path], Path]] = {
    "own": lambda folder: own_npz(folder / "t.npz", routing(8)),
    "counts": lambda folder: (np.savez(folder / "c.npz", counts=np.ones((2, 8))), folder / "c.npz")[1],
    "array": _npy,
    "vllm": lambda folder: write_lines(folder / "v.jsonl", [vllm_response(routing(8), 3)] * 3),
    "sglang": lambda folder: write_lines(folder / "s.jsonl", [sglang_response(routing(20), 3)] * 3),
    "megatron": lambda folder: write_lines(folder / "router_trace_rank0.jsonl", router_lines(routing(8), step=1) * 2),
    "dump": _dump,
    "stat": lambda folder: write_stat(folder / "s.pt", np.ones((2, HIDDEN, 8), np.int32)),
    "tensorrt": _statistics,
}


@pytest.fixture(scope="module", params=sorted(MADE))
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = MADE[request.param](tmp_path_factory.mktemp(request.param))
    read_source(str(_source(path)))
    return path


def _source(path: Path) -> Path:
    return path.parent if (path.parent / "meta_info.json").exists() else path


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_by_name_and_nothing_else(good: Path, data: st.DataObject) -> None:
    """Cut anywhere, or a few bytes changed. What can still be read must be a trace or counts that check themselves."""
    whole = good.read_bytes()
    try:
        damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)), label="length")])
        for _ in range(data.draw(st.integers(0, 4), label="changes") if damaged else 0):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        good.write_bytes(damaged)
        read_source(str(_source(good)))
    except TraceError as error:
        assert good.name in str(error) or good.parent.name in str(error) or "responses" in str(error)
    finally:
        good.write_bytes(whole)


class Trap:
    """What must never be unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _torch_zip(path: Path, value: Any) -> Path:
    """A `.pt` whose pickle is ours."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr("archive/version", "3\n")
    return path


def test_code_in_a_pickle_never_runs(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = Trap(sprung)
    _torch_zip(tmp_path / "new.pt", {"logical_count": trap})
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"records": [trap]}, protocol=2))
    np.save(tmp_path / "a.npy", np.array([trap], object), allow_pickle=True)
    np.savez(tmp_path / "t.npz", experts=np.array([trap], object), request=0, position=0, num_experts=1)
    np.savez(tmp_path / "c.npz", counts=np.array([[trap]], object))
    for name in ("new.pt", "old.pt", "a.npy", "t.npz", "c.npz"):
        with pytest.raises(TraceError) as caught:
            read_source(str(tmp_path / name))
        assert name in str(caught.value)
        assert not sprung.exists()
    with pytest.raises(FileExistsError):
        sprung.mkdir()
        pickle.loads(pickle.dumps(trap))


def test_a_dump_that_was_written_on_a_gpu_is_read_on_the_cpu(tmp_path: Path) -> None:
    here = write_stat(tmp_path / "cpu.pt", np.ones((2, HIDDEN, 8), np.int32))
    with zipfile.ZipFile(here) as archive, zipfile.ZipFile(tmp_path / "gpu.pt", "w", zipfile.ZIP_STORED) as other:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):
                assert b"X\x03\x00\x00\x00cpu" in content
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            other.writestr(name, content)
    found = read_pt(tmp_path / "gpu.pt")
    assert found["logical_count"].sum() == 2 * HIDDEN * 8


BAD_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "id": ({"topk_ids_of_layer": np.full((HIDDEN, 2, 8), 20, np.int32)}, "layer 0, token 0 names physical expert 20"),
    "below": ({"topk_ids_of_layer": np.full((HIDDEN, 2, 8), -2, np.int32)}, "names physical expert -2"),
    "layers": ({"topk_ids_of_layer": np.zeros((2, 2, 8), np.int32)}, "must be [4 layers, 2 tokens, K]"),
    "floats": ({"topk_ids_of_layer": np.zeros((HIDDEN, 2, 8))}, "must be integers in 3 dimensions, got float64"),
    "none": ({"topk_ids_of_layer": None}, "must be integers in 3 dimensions"),
    "lengths": ({"extend_seq_lens": [3]}, "'extend_seq_lens' sums to 3, but there are 2 tokens"),
    "position": ({"positions": [-1, 0]}, "'positions' go from -1"),
    "rank": ({"rank": "0"}, "'rank' must be a number"),
    "ids": ({"input_ids": [1]}, "'input_ids' has 1 tokens, 'positions' 2"),
}


@pytest.mark.parametrize("name", sorted(BAD_RECORDS))
def test_a_wrong_record_is_named_with_its_value(tmp_path: Path, name: str) -> None:
    import torch

    change, said = BAD_RECORDS[name]
    changed = {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in change.items()
    }
    slots = slots_of()
    fine = token_record(routing(2), slots, positions=[0, 1], lens=[2])
    path = write_dump(tmp_path / "d.pt", [fine, fine | {"forward_pass_id": 1} | changed], slots)
    with pytest.raises(TraceError) as caught:
        read_source(str(path))
    assert "d.pt, record 1" in str(caught.value)
    assert said in str(caught.value)


def test_files_of_two_models_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", routing(4, layers=3))
    np.save(tmp_path / "b.npy", routing(4, layers=5))
    with pytest.raises(TraceError, match=r"b\.npy.*another model than the files before: 5 layers"):
        read_source(str(tmp_path))
    count = np.ones((1, HIDDEN, 8), np.int32)
    (tmp_path / "pt").mkdir()
    write_stat(tmp_path / "pt" / "1.pt", count)
    write_stat(tmp_path / "pt" / "2.pt", count[:, :, :4])
    with pytest.raises(TraceError, match=r"2\.pt: of another model"):
        read_source(str(tmp_path / "pt"))


def test_an_id_beyond_the_experts_is_named_with_its_place(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", with_dense(routing(4)))
    with pytest.raises(TraceError, match=r"a\.npy'.*token \d+, layer \d+ names expert \d+; ids go from 0 to 7"):
        read_source(str(tmp_path / "a.npy"), Hints(num_experts=8))


BAD_LINES = {
    "not json": (b'{"top_indices": [[1,2]], nonsense}\n{}\n', "line 1: not JSON"),
    "words": (b'{"top_indices": [["a"]], "step": 1, "rank": 0, "layer": 0}\n', "must be [tokens, top_k] expert ids"),
    "ragged": (b'{"top_indices": [[1,2],[3]], "step": 1, "rank": 0, "layer": 0}\n', "no table of one width"),
    "tokens": (b'{"top_indices": [[1,2]], "num_tokens": 5, "step": 1, "rank": 0, "layer": 0}\n', "'num_tokens' is 5"),
    "step": (b'{"top_indices": [[1,2]], "rank": 0, "layer": 0}\n', "'step' must be a number"),
    "id": (b'{"top_indices": [[1,70000]], "step": 1, "rank": 0, "layer": 0}\n', "names expert 70000"),
}


@pytest.mark.parametrize("name", sorted(BAD_LINES))
def test_a_wrong_line_of_a_router_trace_is_named(tmp_path: Path, name: str) -> None:
    content, said = BAD_LINES[name]
    (tmp_path / "router_trace_rank0.jsonl").write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_source(str(tmp_path))
    assert "router_trace_rank0.jsonl, line 1" in str(caught.value)
    assert said in str(caught.value)


BAD_STATISTICS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"1_3": np.ones(5, np.int64)}, "key '1_3': must be [8] integers"),
    "negative": ({"1_3": np.full(8, -4)}, "expert 0 has a count of -4"),
    "key": ({"layer": np.ones(8, np.int64)}, "key 'layer' is not ITERATION_LAYER"),
    "type": ({"1_3": np.ones(8)}, "must be [8] integers like 'num_experts', got float64"),
}


@pytest.mark.parametrize("name", sorted(BAD_STATISTICS))
def test_wrong_statistics_are_named_with_key_and_value(tmp_path: Path, name: str) -> None:
    from safetensors.numpy import save_file

    tensors, said = BAD_STATISTICS[name]
    write_statistics(tmp_path, np.ones((1, 1, 3, 8), np.int64))
    save_file(tensors, tmp_path / "rank0.safetensors")
    with pytest.raises(TraceError) as caught:
        read_source(str(tmp_path))
    assert "rank0.safetensors" in str(caught.value)
    assert said in str(caught.value)


def test_the_largest_id_stays_below_what_a_trace_can_hold(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[[65_535, 0]]], np.uint16))
    with pytest.raises(TraceError, match="names expert 65535; ids go from 0 to 65534"):
        read_source(str(tmp_path / "a.npy"))


BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": ({"num_experts": np.int64(0)}, "'num_experts' must be from 1 to 65535, got 0"),
    "too many": ({"num_experts": np.int64(10**9)}, "'num_experts' must be from 1 to 65535, got 1000000000"),
    "position": ({"position": np.arange(8) + 2**40}, "key 'position' goes from 1099511627776"),
    "request": ({"request": np.arange(8, dtype=np.uint64) + 2**63}, "key 'request' goes from 9223372036854775808"),
    "weights": ({"gate_weight": np.zeros((8, 3, 5), np.float16)}, "'gate_weight' must be [8, 3, 4]"),
}


@pytest.mark.parametrize("name", sorted(BAD_ARRAYS))
def test_values_that_a_trace_can_not_keep_are_refused(tmp_path: Path, name: str) -> None:
    arrays, said = BAD_ARRAYS[name]
    with pytest.raises(TraceError) as caught:
        read_source(str(own_npz(tmp_path / "t.npz", routing(8), **arrays)))
    assert said in str(caught.value)


def test_dumps_without_anything_in_them_are_refused(tmp_path: Path) -> None:
    import torch

    empty = torch.zeros(0, HIDDEN, 8, dtype=torch.int32)
    torch.save({"logical_count": empty}, tmp_path / "stat.pt")
    torch.save({"logical_count": torch.ones(2, 3, 4).to_sparse()}, tmp_path / "sparse.pt")
    write_dump(tmp_path / "pass.pt", [{"global_physical_count": empty.sum(0)[:0]}], slots_of())
    write_dump(tmp_path / "none.pt", [], slots_of())
    for name, said in (("stat", "every count is 0"), ("pass", "must be counts"), ("none", "no records")):
        with pytest.raises(TraceError, match=said):
            read_source(str(tmp_path / f"{name}.pt"))
    with pytest.raises(TraceError, match=r"sparse\.pt: holds a torch.sparse_coo tensor"):
        read_source(str(tmp_path / "sparse.pt"))
