from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from placement.errors import TraceError
from placement.trace import load_trace
from workers.options import RecorderOptions
from workers.recorder import Recorder, StepTokens

LAYERS, EXPERTS, TOP_K = 2, 8, 2


def _recorder(folder: Path | None, **options: Any) -> Recorder:
    return Recorder(
        RecorderOptions(folder=folder, **options),
        rank=3,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        top_k=TOP_K,
        model="tiny",
    )


def _step(recorder: Recorder, step: int, num_tokens: int) -> None:
    tokens = StepTokens(
        request=np.full(num_tokens, 7, np.int64),
        position=np.arange(num_tokens, dtype=np.int32),
        token_id=np.arange(num_tokens, dtype=np.int32),
        phase=np.zeros(num_tokens, np.uint8),
    )
    recorder.begin_step(step, tokens)
    for layer in range(LAYERS):
        chosen = np.tile([layer, layer + 1], (num_tokens, 1))
        recorder.record(layer, chosen, torch.full((num_tokens, TOP_K), 0.5))
    recorder.end_step()


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    _step(recorder, 5, 3)
    recorder.stop()
    trace = load_trace(tmp_path)
    assert trace.experts.tolist() == [[[0, 1], [1, 2]]] * 3
    assert trace.gate_weight is not None
    assert trace.gate_weight.ravel().tolist() == [0.5] * 12
    assert (trace.model, trace.num_experts) == ("tiny", EXPERTS)
    assert trace.source_rank.tolist() == [3, 3, 3]
    assert trace.step.tolist() == [5, 5, 5]
    assert trace.position.tolist() == [0, 1, 2]


def test_a_step_that_failed_leaves_nothing(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    tokens = StepTokens(
        request=np.zeros(1, np.int64),
        position=np.zeros(1, np.int32),
        token_id=np.zeros(1, np.int32),
        phase=np.zeros(1, np.uint8),
    )
    recorder.begin_step(0, tokens)
    recorder.record(0, np.zeros((1, TOP_K), np.int64), torch.ones(1, TOP_K))
    recorder.abandon_step()
    recorder.stop()
    with pytest.raises(TraceError, match="the folder has no"):
        load_trace(tmp_path)


def test_a_tenth_of_the_steps_is_kept_whole_at_rate_a_tenth(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, rate=0.1)
    for step in range(1000):
        _step(recorder, step, 2)
    recorder.stop()
    assert recorder.counters.steps_seen == 1000
    assert 80 <= recorder.counters.steps_kept <= 120
    steps = load_trace(tmp_path).step
    assert (np.unique(steps, return_counts=True)[1] == 2).all()


def test_the_ring_drops_the_oldest_steps_and_counts_them(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, ring_tokens=10, segment_tokens=1000)
    for step in range(5):
        _step(recorder, step, 4)
    recorder.stop()
    assert recorder.counters.tokens_dropped == 12
    assert np.unique(load_trace(tmp_path).step).tolist() == [3, 4]


def test_the_oldest_segments_go_when_the_disk_budget_is_spent(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, max_bytes=3000)
    for step in range(10):
        _step(recorder, step, 4)
        recorder.flush()
    recorder.stop()
    left = sorted(tmp_path.iterdir())
    assert sum(path.stat().st_size for path in left) <= 3000
    assert recorder.counters.segments_deleted == 10 - len(left)
    assert load_trace(tmp_path).step.max() == 9


def test_a_restarted_rank_does_not_overwrite_its_segments(tmp_path: Path) -> None:
    for step in range(2):
        recorder = _recorder(tmp_path)
        _step(recorder, step, 1)
        recorder.stop()
    assert sorted(load_trace(tmp_path).step.tolist()) == [0, 1]


def test_a_folder_that_is_gone_costs_tokens_but_does_not_stop_serving(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    recorder = _recorder(folder)
    folder.rmdir()
    _step(recorder, 0, 3)
    recorder.stop()
    assert recorder.counters.write_errors == 1
    assert recorder.counters.tokens_dropped == 3


def test_a_recorder_without_a_folder_records_nothing() -> None:
    recorder = _recorder(None)
    _step(recorder, 0, 3)
    recorder.stop()
    assert recorder.counters.steps_kept == 0


def test_a_foreign_file_among_the_segments_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "rank00003-copy.safetensors").write_text("")
    recorder = _recorder(tmp_path)
    _step(recorder, 0, 1)
    recorder.stop()
    assert (tmp_path / "rank00003-00000000.safetensors").exists()
