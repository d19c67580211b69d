"""ExpertWorker: one rank. It owns a model, its experts, an engine in step with the others, and a recorder.

Life: made, joined to its peers; then requests come and events go, and epochs change at step boundaries; stopped.
It is a plain class: `cluster/actors.py` wraps it for Ray, and tests run it in bare processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from placement.core import Placement
from placement.errors import ExchangeError, RequestError
from placement.migration import Move
from placement.topology import Topology
from placement.trace import DECODE, PREFILL
from workers import peers
from workers.epochs import EpochKeeper
from workers.events import CANCELLED, FAILED, EventRouter, TokenEvent, request_of
from workers.loading import ModelShape, device_of, load_share
from workers.lockstep import LockstepManager
from workers.mover import Mover
from workers.numa import bind_near
from workers.options import WorkerOptions
from workers.parallel_model import ParallelModel
from workers.peers import Rendezvous
from workers.recorder import Recorder, StepTokens
from workers.requests import GenerationRequest, check_request, request_number
from workers.step_clock import StepClock, StepSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a rank says of itself: the epoch it serves, sizes, and counters since it started."""

    rank: int
    epoch: int
    alive: bool
    error: str | None
    steps: int
    experts: int
    host_slab_bytes: int
    slot_bytes: int
    cache: dict[str, float]
    recorder: dict[str, float]
    traffic: dict[str, float]


class ExpertWorker:
    """One expert-parallel rank of a served model."""

    def __init__(self, options: WorkerOptions, *, rank: int, topology: Topology, placement: Placement) -> None:
        torch.set_num_threads(options.threads)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._options = options
        self._rank = rank
        self._num_ranks = topology.num_ranks
        self._device = device_of(options.device)
        bind_near(self._device)
        model, experts = load_share(options, self._device)
        self._parallel = ParallelModel(
            model,
            experts=experts,
            placement=placement,
            topology=topology,
            rank=rank,
            device=self._device,
            cache_share=options.cache_share,
            host_slab_rows=options.host_slab_rows,
        )
        self._epochs = EpochKeeper(
            table=self._parallel.table,
            slab=self._parallel.slab,
            cache=self._parallel.cache,
            timeout_s=options.peer_timeout_s,
        )
        shape = self._parallel.shape
        self._recorder = Recorder(
            options.recorder,
            rank=rank,
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            model=options.model.name,
        )
        self._clock = StepClock()
        self._router = EventRouter()
        self._store: Any = None
        self._steps = 0

    @property
    def expert_bytes(self) -> int:
        """The size of one expert's blob."""
        return self._parallel.layout.num_bytes

    # ------------------------------------------------------------------------------------------- coming, leaving

    def open_rendezvous(self, *, host: str, interface: str) -> Rendezvous:
        """Rank 0 opens the store where all ranks meet."""
        self._store = peers.open_store(host=host, num_ranks=self._num_ranks, timeout_s=self._options.peer_timeout_s)
        return Rendezvous(host=host, port=self._store.port, interface=interface)

    def join(self, rendezvous: Rendezvous) -> ModelShape:
        """Meet the other ranks and serve in step with them. Every rank must call this at about the same time."""
        groups = peers.join(
            rendezvous,
            rank=self._rank,
            num_ranks=self._num_ranks,
            device=self._device,
            timeout_s=self._options.peer_timeout_s,
            store=self._store,
        )
        self._mover = Mover(
            self._parallel.slab, group=groups.bulk, rank=self._rank, blob_bytes=self._parallel.layout.num_bytes
        )
        self._parallel.attach(groups.data, self._recorder, self._clock)
        model, options = self._parallel.model, self._options
        generation = GenerationConfig.from_model_config(model.config)
        generation.update(do_sample=False, max_new_tokens=1, eos_token_id=model.generation_config.eos_token_id)
        batching = ContinuousBatchingConfig(
            page_size=options.kv_page_size,
            num_blocks=options.kv_pages,
            max_batch_tokens=options.max_batch_tokens,
            max_requests_per_batch=options.max_requests,
            use_async_batching=False,
            use_cuda_graph=False,
            allow_block_sharing=False,
            auto_switch_to_flash=False,
        )
        self._manager = LockstepManager(
            model, generation, batching, control=groups.control, hooks=self, router=self._router
        )
        with torch.no_grad():
            self._manager.start()
        return self._parallel.shape

    def stop(self) -> None:
        """Finish what runs, stop in step with the others, and leave the groups."""
        self._manager.stop(block=True, timeout=self._options.peer_timeout_s)
        self._recorder.stop()
        peers.leave()

    # -------------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> None:
        """Take a request. Raises RequestError when it can't be served here; others are not affected."""
        config = self._parallel.model.config.get_text_config()
        limit = min(config.max_position_embeddings, self._options.kv_page_size * self._options.kv_pages)
        check_request(request, vocabulary=config.vocab_size, max_tokens=limit)
        name = self._router.open(request.request)
        if name is None:
            raise RequestError(f"request '{request.request}': a request of this id is running")
        accepted = self._manager.add_request(
            list(request.prompt),
            request_id=name,
            max_new_tokens=request.max_new_tokens,
            streaming=request.stream,
            sampling=request.sampling,
        )
        if accepted is None:
            self._router.close(request.request, FAILED, f"rank {self._rank} is stopping")

    def cancel(self, request: str) -> None:
        """Stop a request; its last event says 'cancelled'. A request that is not running is no error."""
        name = self._router.close(request, CANCELLED)
        if name is not None:
            self._manager.cancel_request(name)

    def next_events(self, timeout_s: float) -> list[TokenEvent]:
        """The events since the last call; waits up to timeout_s for the first.

        Raises ExchangeError once all events are taken of a rank that has stopped serving.
        """
        events = self._router.take(timeout_s)
        if not events and not self._manager.is_running():
            raise ExchangeError(str(self._manager.background_thread_status.fatal_error))
        return events

    # -------------------------------------------------------------------------------------------- change of epoch

    def copy_round(self, target_epoch: int, moves: Sequence[Move]) -> int:
        """This rank's share of one round of a migration to an epoch ahead. Returns the bytes received."""
        self._epochs.check_ahead(target_epoch)
        return self._mover.copy_round(moves)

    def prepare(self, target: Placement) -> None:
        self._epochs.prepare(target)

    def commit(self, epoch: int) -> None:
        self._epochs.commit(epoch)

    def abort(self, epoch: int) -> int:
        return self._epochs.abort(epoch)

    def drop(self, epoch: int) -> int:
        return self._epochs.drop(epoch)

    # ---------------------------------------------------------------- hooks of the engine, on the serving thread

    def ready_epoch(self) -> int:
        return self._epochs.vote()

    def enter_epoch(self, epoch: int) -> None:
        self._epochs.enter(epoch)

    def begin_step(self, batch: list[Any], input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        self._clock.begin()
        self._parallel.table.begin_step()
        lengths = [entry.query_length for entry in batch]
        requests = [request_number(request_of(entry.state.request_id)) for entry in batch]
        phases = [PREFILL if length > 1 else DECODE for length in lengths]
        tokens = StepTokens(
            request=np.repeat(np.array(requests, np.int64), lengths),
            phase=np.repeat(np.array(phases, np.uint8), lengths),
            position=position_ids.cpu().numpy().astype(np.int32),
            token_id=input_ids.cpu().numpy().astype(np.int32),
        )
        self._recorder.begin_step(self._steps, tokens)

    def end_step(self) -> None:
        self._recorder.end_step()
        self._parallel.table.begin_step()
        self._clock.end(self._steps)
        self._steps += 1

    def join_step(self) -> None:
        self._recorder.abandon_step()
        self._clock.begin()
        self._parallel.join_step()
        self._clock.end(self._steps)
        self._steps += 1

    # ------------------------------------------------------------------------------------------------- looking in

    def status(self) -> WorkerStatus:
        error = self._manager.background_thread_status.fatal_error
        cache, recorder = self._parallel.cache, self._recorder.counters
        return WorkerStatus(
            rank=self._rank,
            epoch=self._parallel.table.epoch,
            alive=self._manager.is_running(),
            error=None if error is None else str(error),
            steps=self._steps,
            experts=len(self._parallel.slab.experts()),
            host_slab_bytes=self._parallel.slab.num_bytes,
            slot_bytes=cache.num_bytes,
            cache={name: getattr(cache.counters, name) for name in type(cache.counters).__slots__},
            recorder={name: getattr(recorder, name) for name in type(recorder).__slots__},
            traffic=asdict(self._parallel.table.traffic),
        )

    def recent_steps(self) -> list[StepSeconds]:
        """How long the last steps took, oldest first."""
        return self._clock.recent()

    def flush_trace(self) -> None:
        """Write what was recorded so far to disk."""
        self._recorder.flush()
