"""Continuous batching in step: Transformers' own manager, with every rank taking each step together.

Expert-parallel layers are collectives, so no rank may step alone. Before each step the ranks agree, over a gloo group
of their own, whether anyone has work, whether all want to stop, and whether all are ready for a newer epoch. A rank
without work joins each layer's exchange with zero tokens. This overrides a private method of Transformers
(`_generation_loop_body`), which is why its version is pinned and why the override stands alone in this file.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.utils import stream_context

from placement.errors import ExchangeError, StaleEpochError
from workers.events import EventRouter
from workers.group import Group
from workers.sampling import RowSampler

IDLE_WAIT_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks found together before a step. epoch is the newest that every rank is ready to serve.

    most_tokens: of any rank in the step.
    """

    any_work: bool
    most_tokens: int
    all_stop: bool
    epoch: int


class StepHooks(Protocol):
    """What a rank does around the steps. All run on the serving thread."""

    def serving_epoch(self) -> int:
        """The epoch that this rank serves."""

    def ready_epoch(self) -> int:
        """The newest epoch that this rank could serve from the next step on."""

    def enter_epoch(self, epoch: int) -> None:
        """Every rank is ready: serve this epoch from now on."""

    def expect_tokens(self, most: int) -> None:
        """No rank has more tokens than this in the step that comes."""

    def begin_step(self, batch: list[Any], input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        """A step with work of this rank's own begins; ids and positions are [T]."""

    def end_step(self) -> None:
        """The step is done."""

    def join_step(self) -> None:
        """Take part in the layers of this step that this rank has not yet joined, with zero tokens."""

    def make_room(self, reason: str) -> bool:
        """Memory was short: free some. False where there is none to free."""


class LockstepManager(ContinuousBatchingManager):
    """A continuous-batching manager that steps only together with the other ranks of its control group."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        config: ContinuousBatchingConfig,
        *,
        control: Group,
        hooks: StepHooks,
        router: EventRouter,
    ) -> None:
        super().__init__(model, generation_config, config)
        self.output_router = self._router = router
        self.logit_processor = RowSampler(model._get_logits_processor(generation_config))
        self._control = control
        self._hooks = hooks
        self._retries = False

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        if not batch_processor.scheduler.active_requests:
            # Set when the cache was full, and cleared by Transformers only when a request finishes, not when all are
            # cancelled or fail: those that wait would wait forever.
            batch_processor.scheduler.block_new_requests = False
        has_work = self._retries or batch_processor.prepare_next_batch()
        wants_stop = self.background_thread_status.tp_status != BackgroundThreadStatus.DONT_STOP and not has_work
        num_tokens = batch_processor.inputs_and_outputs.num_q_tokens if has_work else 0
        agreed = self._agree(num_tokens, has_work, wants_stop)
        self._hooks.enter_epoch(agreed.epoch)
        self._hooks.expect_tokens(agreed.most_tokens)
        if not agreed.any_work:
            if agreed.all_stop:
                return False
            self._wake_up_loop.wait(timeout=IDLE_WAIT_S)
            self._wake_up_loop.clear()
        elif has_work:
            self._step(batch_processor)
        else:
            self._join(batch_processor)
        return True

    def _join(self, batch_processor: ContinuousBatchProcessor) -> None:
        # On the stream of the forward passes, so that slots are not overwritten while another stream reads them.
        with stream_context(batch_processor.inputs_and_outputs.compute_stream):
            self._hooks.join_step()

    def _step(self, batch_processor: ContinuousBatchProcessor) -> None:
        io = batch_processor.inputs_and_outputs
        num_tokens = io.num_q_tokens
        self._hooks.begin_step(io.requests_in_batch, io.input_ids[:num_tokens], io.position_ids[:num_tokens])
        self._retries = False
        try:
            self._generation_step()
        except torch.OutOfMemoryError as error:
            # Step on with the others, and take the same batch again in the next step: nothing of it was used up.
            self._join(batch_processor)
            self._retries = self._hooks.make_room(str(error))
            if not self._retries:
                batch_processor.handle_batch_error(error)
            return
        except (RuntimeError, ValueError, LookupError) as error:
            # The batch is lost but the other ranks are in the middle of the step: walk through its layers with them.
            self._join(batch_processor)
            batch_processor.handle_batch_error(error)
            return
        self._hooks.end_step()
        self.current_batch += 1
        batch_processor.update_batch()

    def _agree(self, num_tokens: int, has_work: bool, wants_stop: bool) -> Agreement:
        serving = self._hooks.serving_epoch()
        votes = torch.tensor(
            [int(has_work), -int(wants_stop), -self._hooks.ready_epoch(), serving, -serving, num_tokens],
            dtype=torch.int64,
        )
        try:
            self._control.all_reduce_max(votes)
        except ExchangeError as error:
            raise ExchangeError(f"the ranks could not agree on a step: {error}") from error
        any_work, some_go_on, oldest_ready, newest, oldest, most_tokens = votes.tolist()
        if newest != -oldest:
            raise StaleEpochError(f"this rank serves epoch {serving}, but the ranks serve {-oldest} to {newest}")
        return Agreement(
            any_work=bool(any_work), most_tokens=most_tokens, all_stop=some_go_on == -1, epoch=-oldest_ready
        )

    def break_off(self, timeout_s: float) -> bool:
        """End the serving thread without agreement, once its groups are left; False where its step does not end."""
        thread = self._generation_thread
        if thread is not None:
            self._wake_up_loop.set()
            thread.join(timeout_s)
        self.batch_processor = None
        return thread is None or not thread.is_alive()

    def where(self) -> str:
        """The innermost calls of the serving thread, for people who look for what it hangs in."""
        thread = self._generation_thread
        frame = None if thread is None else sys._current_frames().get(thread.ident)
        calls = traceback.extract_stack(frame)[-4:] if frame is not None else []
        return " > ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls)

    def _handle_critical_error(self, error: Exception, batch_processor: ContinuousBatchProcessor | None) -> None:
        # The requests are not at fault: what they have so far is handed out, and they go on with another engine.
        self._router.interrupt()
        super()._handle_critical_error(error, batch_processor)
