"""The steps of one founding: what a rank does around each of them. Everything here runs on the serving thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from placement.trace import DECODE, PREFILL
from workers.epochs import EpochKeeper
from workers.events import request_of
from workers.parallel_model import ParallelModel
from workers.prefetch import PrefetchTrial
from workers.recorder import Recorder, StepTokens
from workers.requests import request_number
from workers.step_clock import StepClock


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """Since the worker started: steps, and tokens that went through the model here."""

    steps: int = 0
    tokens: int = 0


class ServingSteps:
    """The hooks of an engine (see `lockstep.StepHooks`). first_step: the number of the first step."""

    def __init__(
        self,
        *,
        parallel: ParallelModel,
        epochs: EpochKeeper,
        recorder: Recorder,
        clock: StepClock,
        counts: StepCounts,
        fail: Callable[[str, str], None],
        first_step: int,
    ) -> None:
        self._parallel = parallel
        self._epochs = epochs
        self._recorder = recorder
        self._clock = clock
        self._counts = counts
        self._fail = fail
        self._requests: list[str] = []
        self._lengths: list[int] = []
        self._step = first_step
        self._step_tokens = 0
        self._trial = PrefetchTrial()

    def serving_epoch(self) -> int:
        return self._parallel.table.epoch

    def ready_epoch(self) -> int:
        return self._epochs.vote()

    def enter_epoch(self, epoch: int) -> None:
        self._epochs.enter(epoch)

    def expect_tokens(self, most: int) -> None:
        self._parallel.table.expect(most)

    def begin_step(self, batch: list[Any], input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        self._begin()
        self._parallel.table.begin_step()
        lengths = [entry.query_length for entry in batch]
        self._step_tokens = sum(lengths)
        self._counts.tokens += self._step_tokens
        self._requests = [request_of(entry.state.request_id) for entry in batch]
        self._lengths = lengths
        requests = [request_number(request) for request in self._requests]
        phases = [PREFILL if length > 1 else DECODE for length in lengths]
        tokens = StepTokens(
            request=np.repeat(np.array(requests, np.int64), lengths),
            phase=np.repeat(np.array(phases, np.uint8), lengths),
            position=position_ids.cpu().numpy().astype(np.int32),
            token_id=input_ids.cpu().numpy().astype(np.int32),
        )
        self._recorder.begin_step(self._step, tokens)

    def end_step(self) -> None:
        self._recorder.end_step()
        self._fail_spoiled()
        self._parallel.table.begin_step()
        self._count_step()

    def join_step(self) -> None:
        self._recorder.abandon_step()
        self._begin()
        self._parallel.join_step()
        self._parallel.spoiled.take()
        self._count_step()

    def make_room(self, reason: str) -> bool:
        return self._parallel.relief.make_room(reason)

    def _begin(self) -> None:
        self._clock.begin()
        self._step_tokens = 0
        self._parallel.cache.ahead.wanted = self._trial.wants(self._step)

    def _fail_spoiled(self) -> None:
        """Fail the requests of tokens that lacked an expert."""
        spoiled = self._parallel.spoiled.take()
        for index in np.unique(np.repeat(np.arange(len(self._lengths)), self._lengths)[spoiled]):
            request = self._requests[index]
            self._fail(request, f"request '{request}': an expert that it needs can't be read from disk")

    def _count_step(self) -> None:
        self._trial.took(self._step, self._step_tokens, self._clock.end(self._step))
        self._parallel.relief.end_step()
        self._counts.steps += 1
        self._step += 1
