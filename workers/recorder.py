"""The recorder: routing decisions of sampled steps, in a bounded ring, written as whole segments by its own thread.

It never slows serving down to save data: when the ring is full the oldest steps are dropped and counted, and when the
disk is full or the budget of bytes is spent the oldest segments go first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from placement.trace import RoutingTrace, concatenate, write_segment
from workers.options import RecorderOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Who the tokens of a step are: request, position, token_id, phase, each [T]."""

    request: NDArray[np.int64]
    position: NDArray[np.int32]
    token_id: NDArray[np.int32]
    phase: NDArray[np.uint8]


@dataclass(slots=True, kw_only=True)
class RecorderCounters:
    """What was kept and lost, and the time that recording took on the serving thread."""

    steps_seen: int = 0
    steps_kept: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0
    segments_written: int = 0
    segments_deleted: int = 0
    write_errors: int = 0
    record_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _OpenStep:
    step: int
    tokens: StepTokens
    experts: NDArray[Any]
    gate_weight: NDArray[np.float16]
    layers: set[int] = field(default_factory=set)


class Recorder:
    """One rank's recorder. begin_step, record and end_step run on the serving thread; the rest from any."""

    def __init__(
        self, options: RecorderOptions, *, rank: int, num_layers: int, num_experts: int, top_k: int, model: str
    ) -> None:
        self._options = options
        self._rank = rank
        self._shape = (num_layers, top_k)
        self._num_experts = num_experts
        self._model = model
        self._dtype = np.uint8 if num_experts <= 256 else np.uint16
        self._open: _OpenStep | None = None
        self._ring: deque[RoutingTrace] = deque()
        self._ring_tokens = 0
        self._changed = threading.Condition()
        self._write_lock = threading.Lock()
        self._next_segment = 0
        self._stopping = False
        self.counters = RecorderCounters()
        self._thread = threading.Thread(target=self._write_when_full, name="recorder", daemon=True)
        if options.folder is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
            self._next_segment = _next_number(options.folder, rank)
            self._thread.start()

    def begin_step(self, step: int, tokens: StepTokens) -> None:
        """Decide by the step's number, alike on every rank, whether this step is kept."""
        start = time.perf_counter()
        self.counters.steps_seen += 1
        if self._options.folder is not None and _share(step) < self._options.rate:
            shape = (len(tokens.request), *self._shape)
            self._open = _OpenStep(
                step=step, tokens=tokens, experts=np.zeros(shape, self._dtype), gate_weight=np.zeros(shape, np.float16)
            )
        self.counters.record_s += time.perf_counter() - start

    def record(self, layer: int, chosen: NDArray[Any], weights: torch.Tensor) -> None:
        """chosen [T, K] logical experts of one layer, weights [T, K]; ignored when the step is not kept."""
        if self._open is None or not len(chosen):
            return
        start = time.perf_counter()
        self._open.experts[:, layer] = chosen
        self._open.gate_weight[:, layer] = weights.float().cpu().numpy()
        self._open.layers.add(layer)
        self.counters.record_s += time.perf_counter() - start

    def end_step(self) -> None:
        """Put the step into the ring; the oldest steps make room."""
        if self._open is None:
            return
        start = time.perf_counter()
        step, self._open = self._open, None
        assert len(step.layers) == self._shape[0]
        self._push(self._as_trace(step))
        self.counters.record_s += time.perf_counter() - start

    def abandon_step(self) -> None:
        """The step failed: nothing of it is kept."""
        self._open = None

    def flush(self) -> None:
        """Write what the ring holds now; returns when it is on disk."""
        if self._options.folder is not None:
            self._write_ring(self._options.folder)

    def stop(self) -> None:
        """Flush and end the writer thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()

    def _as_trace(self, step: _OpenStep) -> RoutingTrace:
        num_tokens = len(step.tokens.request)
        return RoutingTrace(
            num_experts=self._num_experts,
            experts=step.experts,
            gate_weight=step.gate_weight,
            request=step.tokens.request,
            position=step.tokens.position,
            token_id=step.tokens.token_id,
            phase=step.tokens.phase,
            step=np.full(num_tokens, step.step, np.int64),
            source_rank=np.full(num_tokens, self._rank, np.int32),
            model=self._model,
            sampling_rate=self._options.rate,
        )

    def _push(self, trace: RoutingTrace) -> None:
        with self._changed:
            self._ring.append(trace)
            self._ring_tokens += trace.num_tokens
            self.counters.steps_kept += 1
            self.counters.tokens_kept += trace.num_tokens
            while self._ring_tokens > self._options.ring_tokens and len(self._ring) > 1:
                oldest = self._ring.popleft()
                self._ring_tokens -= oldest.num_tokens
                self.counters.tokens_dropped += oldest.num_tokens
            if self._ring_tokens >= self._options.segment_tokens:
                self._changed.notify_all()

    def _write_when_full(self) -> None:
        assert self._options.folder is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._ring_tokens >= self._options.segment_tokens)
                if self._stopping:
                    return
            self._write_ring(self._options.folder)

    def _write_ring(self, folder: Path) -> None:
        with self._write_lock:
            with self._changed:
                steps = list(self._ring)
                self._ring.clear()
                self._ring_tokens = 0
            if not steps:
                return
            path = folder / f"rank{self._rank:05d}-{self._next_segment:08d}.safetensors"
            self._next_segment += 1
            try:
                write_segment(concatenate(steps, source="ring"), path)
                self.counters.segments_written += 1
                self._delete_oldest(folder)
            except OSError as error:
                self.counters.write_errors += 1
                self.counters.tokens_dropped += sum(step.num_tokens for step in steps)
                logger.warning("trace segment %s could not be written (%s); its tokens are dropped", path, error)

    def _delete_oldest(self, folder: Path) -> None:
        segments = sorted(folder.glob(f"rank{self._rank:05d}-*.safetensors"))
        sizes = [segment.stat().st_size for segment in segments]
        while sum(sizes) > self._options.max_bytes and len(sizes) > 1:
            segments.pop(0).unlink()
            sizes.pop(0)
            self.counters.segments_deleted += 1


def _next_number(folder: Path, rank: int) -> int:
    """One more than the largest number among the rank's segments; other files are none of its business."""
    numbers = [path.stem.rsplit("-", 1)[1] for path in folder.glob(f"rank{rank:05d}-*.safetensors")]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1


def _share(step: int) -> float:
    """A number in [0, 1) that looks random and depends on the step alone."""
    return (step * 0x9E3779B97F4A7C15 % 2**64) / 2**64
