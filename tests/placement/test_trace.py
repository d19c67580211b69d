from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import TraceError
from placement.trace import RoutingTrace, load_trace, read_segment, write_segment


def _trace(num_tokens: int = 6, layers: int = 2, experts: int = 4, **more: Any) -> RoutingTrace:
    values: dict[str, Any] = {
        "num_experts": experts,
        "experts": np.arange(num_tokens * layers * 2).reshape(num_tokens, layers, 2).astype(np.uint8) % experts,
        "request": np.arange(num_tokens, dtype=np.int64) // 2,
        "position": np.arange(num_tokens, dtype=np.int32) % 2,
        "step": np.zeros(num_tokens, np.int64),
        "source_rank": np.zeros(num_tokens, np.int32),
        "phase": np.zeros(num_tokens, np.uint8),
    }
    return RoutingTrace(**values | more)


def _npz(path: Path, **changes: Any) -> Path:
    arrays: dict[str, Any] = {
        "experts": np.zeros((4, 2, 2), np.uint8),
        "request": np.arange(4, dtype=np.int32),
        "position": np.zeros(4, np.int32),
        "num_experts": np.int64(4),
    }
    kept = {name: value for name, value in (arrays | changes).items() if value is not None}
    np.savez(path, **kept)
    return path


@given(num_tokens=st.integers(1, 20), layers=st.integers(1, 3), weighted=st.booleans())
def test_a_segment_is_written_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, num_tokens: int, layers: int, weighted: bool
) -> None:
    path = tmp_path_factory.mktemp("segment") / "a.safetensors"
    weights = np.full((num_tokens, layers, 2), 0.25, np.float16) if weighted else None
    trace = _trace(num_tokens, layers, gate_weight=weights, workload_names=("a", "b"), model="m", sampling_rate=0.5)
    write_segment(trace, path)
    again = read_segment(path)
    assert again.experts.tolist() == trace.experts.tolist()
    assert again.request.tolist() == trace.request.tolist()
    assert (again.gate_weight is None) == (not weighted)
    assert (again.workload_names, again.model, again.sampling_rate) == (("a", "b"), "m", 0.5)


def test_a_folder_is_the_sum_of_its_segments(tmp_path: Path) -> None:
    for index in range(3):
        write_segment(_trace(), tmp_path / f"rank{index}.safetensors")
    assert load_trace(tmp_path).num_tokens == 18


def test_even_requests_are_fitted_on_and_odd_ones_judged() -> None:
    fit, judged = _trace(8).split_by_request()
    assert set(fit.request.tolist()) == {0, 2}
    assert set(judged.request.tolist()) == {1, 3}


def test_requests_of_one_parity_are_split_in_the_middle() -> None:
    fit, judged = _trace(4, request=np.array([2, 2, 4, 6])).split_by_request()
    assert fit.request.tolist() == [2, 2]
    assert judged.request.tolist() == [4, 6]


def test_one_request_can_not_be_split() -> None:
    with pytest.raises(TraceError, match="one request only"):
        _trace(2).split_by_request()


def test_segments_of_two_models_are_refused(tmp_path: Path) -> None:
    write_segment(_trace(), tmp_path / "a.safetensors")
    write_segment(_trace(layers=3), tmp_path / "b.safetensors")
    with pytest.raises(TraceError, match=r"segments of two models: layers, experts, top_k \(2, 4, 2\) and \(3, 4, 2\)"):
        load_trace(tmp_path)


def test_a_truncated_segment_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_segment(_trace(), path)
    for length in (0, 5, 40, path.stat().st_size - 1):
        (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:length])
        with pytest.raises(TraceError, match=r"cut\.safetensors"):
            read_segment(tmp_path / "cut.safetensors")


def test_a_half_written_segment_is_not_seen(tmp_path: Path) -> None:
    write_segment(_trace(), tmp_path / "a.safetensors")
    (tmp_path / ".b.safetensors.part").write_bytes(b"half")
    assert load_trace(tmp_path).num_tokens == 6


def test_a_full_disk_leaves_no_part_behind(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_segment(_trace(), target)
    assert list(tmp_path.iterdir()) == [target]


def test_an_npz_with_the_four_keys_is_a_trace(tmp_path: Path) -> None:
    trace = load_trace(_npz(tmp_path / "t.npz"))
    assert (trace.num_tokens, trace.num_layers, trace.top_k, trace.num_experts) == (4, 2, 2, 4)
    assert trace.source_rank.tolist() == [-1] * 4


class Trap:
    """What must never be unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts": None}, "key 'experts' is missing"),
        ({"num_experts": None}, "key 'num_experts' is missing"),
        ({"num_experts": np.arange(3)}, "key 'num_experts' must be one integer"),
        ({"num_experts": np.float64(4)}, "key 'num_experts' must be one integer"),
        ({"experts": np.full((4, 2, 2), 9, np.uint8)}, "token 0, layer 0 names expert 9; ids go from 0 to 3"),
        ({"experts": np.full((4, 2, 2), -1)}, "names expert -1"),
        ({"experts": np.zeros((0, 2, 2), np.uint8)}, "with at least one of each, got (0, 2, 2)"),
        ({"experts": np.zeros((4, 2), np.uint8)}, "must be [tokens, layers, top_k]"),
        ({"experts": np.zeros((4, 2, 2))}, "must hold integers, got float64"),
        ({"request": np.arange(3)}, "'request' must be [4]"),
        ({"request": np.array(["a"] * 4)}, "key 'request' must hold integers"),
        ({"colour": np.arange(4)}, "unknown key 'colour'"),
        ({"experts": np.array([Trap()] * 4)}, "not a readable .npz"),
        ({"workload_names": np.array([Trap()])}, "not a readable .npz"),
    ],
)
def test_what_is_wrong_with_an_npz_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = _npz(tmp_path / "t.npz", **changes)
    with pytest.raises(TraceError, match=re.escape(said)) as caught:
        load_trace(path)
    assert "t.npz" in str(caught.value)
    assert not Path("trapped").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense" * 100])
def test_a_broken_npz_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b.npz").write_bytes(content)
    with pytest.raises(TraceError, match=r"b\.npz"):
        load_trace(tmp_path / "b.npz")


def test_a_folder_without_segments_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no \*\.safetensors segment"):
        load_trace(tmp_path)


def test_a_missing_trace_is_named() -> None:
    with pytest.raises(TraceError, match="'nowhere': no such file or folder"):
        load_trace("nowhere")


def test_a_broken_segment_of_a_folder_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_segment(_trace(), tmp_path / "rank00000-00000000.safetensors")
    (tmp_path / "rank00001-00000000.safetensors").write_bytes(b"half a segm")
    assert load_trace(tmp_path).num_tokens == _trace().num_tokens
    assert "rank00001-00000000.safetensors: not a readable trace segment" in caplog.text


def test_a_folder_of_broken_segments_alone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rank00001-00000000.safetensors").write_bytes(b"half a segm")
    with pytest.raises(TraceError, match="not a readable trace segment"):
        load_trace(tmp_path)
