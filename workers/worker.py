"""ExpertWorker: one rank. It owns a model, its experts, an engine in step with the others, and a recorder.

Life: made, joined to its peers, started; then requests come and events go, epochs change at step boundaries; stopped.
It is a plain class: `cluster/actors.py` wraps it for Ray, and tests run it in bare processes.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from placement.core import Placement
from placement.errors import MigrationError, RequestError, StaleEpochError
from placement.migration import Move
from placement.topology import Topology
from placement.trace import DECODE, PREFILL
from workers import peers
from workers.events import CANCELLED, EventRouter, TokenEvent
from workers.exchange import Exchange
from workers.expert_layer import ExpertLayer
from workers.loading import ModelShape, check_fits, device_of, fill_slab, load_model, shape_of
from workers.lockstep import LockstepManager
from workers.mover import Mover
from workers.options import WorkerOptions
from workers.peers import Rendezvous
from workers.recorder import Recorder, StepTokens
from workers.routing import RoutingTable
from workers.seam import experts_modules, take_over
from workers.slot_cache import SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue greedily."""

    request: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a rank says of itself: the epoch it serves, and counters since it started."""

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


class ExpertWorker:
    """One expert-parallel rank of a served model."""

    def __init__(self, options: WorkerOptions, *, rank: int, topology: Topology, placement: Placement) -> None:
        torch.set_num_threads(options.threads)
        self._options = options
        self._rank = rank
        self._num_ranks = topology.num_ranks
        self._device = device_of(options.device)
        self._model = load_model(options, self._device)
        self.shape = shape_of(self._model)
        check_fits(self.shape, placement)
        self._modules = experts_modules(self._model)
        pin = self._device.type == "cuda"
        self._slab, self._layout = fill_slab(self._modules, placement, rank=rank, spare=options.host_slab_rows, pin=pin)
        self._cache = SlotCache(
            slab=self._slab,
            num_layers=self.shape.num_layers,
            slots_per_layer=max(1, math.ceil(options.cache_share * placement.rows_per_rank)),
            blob_bytes=self._layout.num_bytes,
            device=self._device,
        )
        self._table = RoutingTable(placement=placement, topology=topology, rank=rank, top_k=self.shape.top_k)
        self._recorder = Recorder(
            options.recorder,
            rank=rank,
            num_layers=self.shape.num_layers,
            num_experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            model=options.model.name,
        )
        self._router = EventRouter()
        self._steps = 0
        self._ready: Placement | None = None
        self._prepared: Placement | None = None
        self._voted: Placement | None = None
        self._lock = threading.Condition()

    @property
    def expert_bytes(self) -> int:
        """The size of one expert's blob."""
        return self._layout.num_bytes

    # ------------------------------------------------------------------------------------------------ coming up

    def open_rendezvous(self, *, host: str, interface: str) -> Rendezvous:
        """Rank 0 opens the store where all ranks meet."""
        self._store = peers.open_store(host=host, num_ranks=self._num_ranks, timeout_s=self._options.peer_timeout_s)
        return Rendezvous(host=host, port=self._store.port, interface=interface)

    def join(self, rendezvous: Rendezvous) -> ModelShape:
        """Meet the other ranks and start to serve in step with them. Every rank must call this at about one time."""
        self._peers = peers.join(
            rendezvous,
            rank=self._rank,
            num_ranks=self._num_ranks,
            device=self._device,
            timeout_s=self._options.peer_timeout_s,
            store=getattr(self, "_store", None),
        )
        self._mover = Mover(self._slab, group=self._peers.bulk, rank=self._rank, blob_bytes=self._layout.num_bytes)
        partial_dtype = torch.float64 if self._device.type == "cpu" else torch.float32
        self._exchange = Exchange(self._peers.data, num_ranks=self._num_ranks, partial_dtype=partial_dtype)
        self._layers = [self._make_layer(layer) for layer in range(self.shape.num_layers)]
        take_over(self._model, list(self._layers))
        self._model.to(self._device)
        self._start_engine()
        return self.shape

    def _make_layer(self, layer: int) -> ExpertLayer:
        return ExpertLayer(
            layer=layer,
            module=self._modules[layer],
            layout=self._layout,
            cache=self._cache,
            exchange=self._exchange,
            table=self._table,
            recorder=self._recorder,
            hidden_size=self.shape.hidden_size,
            dtype=self._model.dtype,
            device=self._device,
        )

    def _start_engine(self) -> None:
        options = self._options
        generation = GenerationConfig.from_model_config(self._model.config)
        generation.update(do_sample=False, max_new_tokens=1, eos_token_id=self._model.generation_config.eos_token_id)
        batching = ContinuousBatchingConfig(
            page_size=options.kv_page_size,
            num_blocks=options.kv_pages,
            max_batch_tokens=options.max_batch_tokens,
            max_requests_per_batch=options.max_requests,
            use_async_batching=False,
            use_cuda_graph=False,
            allow_block_sharing=False,
        )
        self._manager = LockstepManager(
            self._model, generation, batching, control=self._peers.control, hooks=self, router=self._router
        )
        with torch.no_grad():
            self._manager.start()

    # -------------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> None:
        """Take a request. Raises RequestError when it can't be served here; others are not affected."""
        self._check_request(request)
        self._router.open(request.request)
        accepted = self._manager.add_request(
            list(request.prompt),
            request_id=request.request,
            max_new_tokens=request.max_new_tokens,
            streaming=request.stream,
        )
        if accepted is None:
            self._router.close(request.request, "failed", "the rank is stopping")

    def _check_request(self, request: GenerationRequest) -> None:
        config = self._model.config.get_text_config()
        if not request.prompt:
            raise RequestError(f"request '{request.request}': the prompt is empty")
        if request.max_new_tokens < 1:
            raise RequestError(f"request '{request.request}': max_new_tokens is {request.max_new_tokens}; at least 1")
        wrong = next((token for token in request.prompt if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"request '{request.request}': token {wrong} is not in the vocabulary (0..{config.vocab_size - 1})"
            )
        total = len(request.prompt) + request.max_new_tokens
        limit = min(config.max_position_embeddings, self._options.kv_page_size * self._options.kv_pages)
        if total > limit:
            raise RequestError(
                f"request '{request.request}': {len(request.prompt)} prompt tokens + {request.max_new_tokens} new are "
                f"{total}, more than the {limit} that fit"
            )
        if self._router.is_open(request.request):
            raise RequestError(f"request '{request.request}': a request of this id is running")

    def cancel(self, request: str) -> None:
        """Stop a request; its last event says 'cancelled'. A request that is not running is no error."""
        if self._router.is_open(request):
            self._manager.cancel_request(request)
            self._router.close(request, CANCELLED)

    def next_events(self, timeout_s: float) -> list[TokenEvent]:
        """The events since the last call; waits up to timeout_s for the first."""
        return self._router.take(timeout_s)

    # -------------------------------------------------------------------------------------------- change of epoch

    def copy_round(self, target_epoch: int, moves: Sequence[Move]) -> int:
        """Copy this rank's share of one round of a migration. Returns bytes received."""
        if target_epoch <= self._table.epoch:
            raise StaleEpochError(f"rank {self._rank} serves epoch {self._table.epoch}; epoch {target_epoch} is past")
        return self._mover.copy_round(moves)

    def prepare(self, target: Placement) -> None:
        """Check that every expert that the target gives this rank is here. Raises MigrationError or StaleEpochError."""
        if target.epoch <= self._table.epoch:
            raise StaleEpochError(f"rank {self._rank} serves epoch {self._table.epoch}; epoch {target.epoch} is past")
        missing = target.experts_on(self._rank) - self._slab.experts()
        if missing:
            raise MigrationError(
                f"rank {self._rank} lacks {len(missing)} experts of epoch {target.epoch}: {min(missing)}"
            )
        with self._lock:
            self._prepared = target

    def commit(self, epoch: int) -> None:
        """Be ready to serve a prepared epoch: all ranks switch at the first step boundary where all are ready."""
        with self._lock:
            if self._prepared is None or self._prepared.epoch != epoch:
                raise MigrationError(f"rank {self._rank} has not prepared epoch {epoch}")
            self._ready = self._prepared

    def abort(self, epoch: int) -> int:
        """Withdraw from an epoch that is not served yet, and free its copies. Returns the epoch that is served.

        A vote that is already cast can't be taken back: wait until the ranks have counted it.
        """
        with self._lock:
            self._ready = self._prepared = None
            if not self._lock.wait_for(lambda: self._voted is None, timeout=self._options.peer_timeout_s):
                raise MigrationError(f"rank {self._rank} waits for the other ranks and can't abort epoch {epoch}")
            served = self._table.placement
            if served.epoch < epoch:
                self._release_unused(served)
            return served.epoch

    def drop(self, epoch: int) -> int:
        """Free the experts that the served epoch no longer gives this rank. Returns how many."""
        with self._lock:
            if self._table.epoch != epoch:
                raise StaleEpochError(
                    f"rank {self._rank} serves epoch {self._table.epoch}, not {epoch}: nothing dropped"
                )
            return self._release_unused(self._table.placement)

    def _release_unused(self, served: Placement) -> int:
        unused = self._slab.experts() - served.experts_on(self._rank)
        for expert in unused:
            self._slab.release(expert)
        return len(unused)

    # ---------------------------------------------------------------- hooks of the engine, on the serving thread

    def ready_epoch(self) -> int:
        with self._lock:
            self._voted = self._ready
            return self._table.epoch if self._voted is None else self._voted.epoch

    def enter_epoch(self, epoch: int) -> None:
        with self._lock:
            if epoch != self._table.epoch:
                assert self._voted is not None and self._voted.epoch == epoch
                for expert in self._table.placement.experts_on(self._rank) - self._voted.experts_on(self._rank):
                    self._cache.forget(expert)
                self._table.switch(self._voted)
                self._ready = self._prepared = None
            self._voted = None
            self._lock.notify_all()

    def begin_step(self, batch: list[Any], input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        self._table.begin_step()
        lengths = [state.query_length for state in batch]
        requests = [request_number(state.state.request_id) for state in batch]
        phases = [PREFILL if state.query_length > 1 else DECODE for state in batch]
        tokens = StepTokens(
            request=np.repeat(np.array(requests, np.int64), lengths),
            phase=np.repeat(np.array(phases, np.uint8), lengths),
            position=position_ids.cpu().numpy().astype(np.int32),
            token_id=input_ids.cpu().numpy().astype(np.int32),
        )
        self._recorder.begin_step(self._steps, tokens)

    def end_step(self) -> None:
        self._recorder.end_step()
        self._steps += 1

    def join_step(self) -> None:
        self._recorder.abandon_step()
        with torch.no_grad():
            for layer in self._layers[self._table.layers_done % self.shape.num_layers :]:
                layer.join_empty()
        self._table.begin_step()
        self._steps += 1

    # ------------------------------------------------------------------------------------------- looking, leaving

    def status(self) -> WorkerStatus:
        error = self._manager.background_thread_status.fatal_error
        cache, recorder = self._cache.counters, self._recorder.counters
        return WorkerStatus(
            rank=self._rank,
            epoch=self._table.epoch,
            alive=self._manager.is_running(),
            error=None if error is None else str(error),
            steps=self._steps,
            experts=len(self._slab.experts()),
            host_slab_bytes=self._slab.num_bytes,
            slot_bytes=self._cache.num_bytes,
            cache={name: getattr(cache, name) for name in ("lookups", "hits", "copies", "copied_bytes", "evictions")},
            recorder={name: getattr(recorder, name) for name in type(recorder).__slots__},
        )

    def flush_trace(self) -> None:
        """Write what was recorded so far to disk."""
        self._recorder.flush()

    def stop(self) -> None:
        """Finish what runs, stop in step with the others, and leave the groups."""
        self._manager.stop(block=True, timeout=self._options.peer_timeout_s)
        self._recorder.stop()
        peers.leave()


def request_number(request: str) -> int:
    """A request's id in traces: 63 bits, the number itself where the id is one."""
    if request.isdecimal() and len(request) < 19:
        return int(request)
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "big") >> 1
