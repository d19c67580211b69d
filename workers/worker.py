"""ExpertWorker: one rank. It owns a model, its experts, an engine in step with the others, and a recorder.

Life: made; takes a seat among its peers, gets what experts it lacks, serves: requests come and events go (`desk.py`),
step follows step (`steps.py`), and epochs change at step boundaries. When a peer is lost it leaves, takes a seat under
a later epoch, and serves on; stopped. It is a plain class: `cluster/actors/worker.py` wraps it for Ray, and tests run
it in bare processes.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from placement.core import ExpertId, Placement
from placement.errors import ExchangeError, MigrationError, StaleEpochError
from placement.migration import Move
from placement.topology import Topology
from workers import peers
from workers.checkpoint import restore_experts
from workers.desk import Desk
from workers.engine import start_engine
from workers.epochs import EpochKeeper
from workers.events import EventRouter, TokenEvent
from workers.filling import tiers_on
from workers.loading import ModelShape, device_of, load_share
from workers.lockstep import LockstepManager
from workers.movers import Movers, make_movers
from workers.numa import bind_near
from workers.options import WorkerOptions
from workers.parallel_model import ParallelModel
from workers.peers import Peers, Rendezvous
from workers.recorder import Recorder
from workers.requests import GenerationRequest
from workers.step_clock import StepClock, StepSeconds
from workers.steps import ServingSteps, StepCounts
from workers.vitals import Holdings, Pulse, WorkerStatus

WORTH_A_LOOK_S = 3.0


class ExpertWorker:
    """One expert-parallel rank of a served model.

    rank: its number in the configured topology, which names its trace; among the ranks that serve it may get another.
    """

    def __init__(self, options: WorkerOptions, *, rank: int, topology: Topology, placement: Placement) -> None:
        torch.set_num_threads(options.threads)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        self._options = options
        self._rank = rank
        self._topology = topology
        # Before CUDA starts: queues enough, so that no stream waits behind another's collective.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self._device = device_of(options.device)
        bind_near(self._device)
        model, experts = load_share(options, self._device)
        self._source = experts if experts.lasts else None
        self._parallel = ParallelModel(
            model,
            experts=experts,
            placement=placement,
            topology=topology,
            rank=rank,
            device=self._device,
            cache_share=options.cache_share,
            host_slab_rows=options.host_slab_rows,
            prefetch=options.prefetch,
            link_bytes_per_s=options.link_bytes_per_s,
            host_budget=None if options.host_slab_gb is None else int(options.host_slab_gb * 1e9),
            disk_path=options.disk_path,
            memory_bytes=options.memory_bytes,
        )
        self._parallel.table.warm_up()
        self._epochs = self._epoch_keeper()
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
        self._counts = StepCounts()
        self._desk = self._new_desk()
        self._store: Any = None
        self._peers: Peers | None = None
        self._mover: Movers | None = None
        self._parted: list[Peers] = []
        self._newest = -1
        self._membership = threading.RLock()

    @property
    def expert_bytes(self) -> int:
        """The size of one expert's blob."""
        return self._parallel.layout.num_bytes

    @property
    def shape(self) -> ModelShape:
        return self._parallel.shape

    @property
    def _engine(self) -> LockstepManager | None:
        return self._desk.engine

    def _epoch_keeper(self) -> EpochKeeper:
        return EpochKeeper(
            table=self._parallel.table,
            slab=self._parallel.slab,
            cache=self._parallel.cache,
            timeout_s=self._options.peer_timeout_s,
        )

    def _new_desk(self) -> Desk:
        config = self._parallel.model.config.get_text_config()
        return Desk(
            rank=self._rank,
            vocabulary=config.vocab_size,
            max_tokens=min(config.max_position_embeddings, self._options.kv_page_size * self._options.kv_pages),
            router=EventRouter(),
        )

    # ------------------------------------------------------------------------------------------- coming, leaving

    def open_rendezvous(self, *, host: str, interface: str, epoch: int = 0, num_ranks: int | None = None) -> Rendezvous:
        """The first of the ranks that are to meet opens the store for it."""
        expected = self._topology.num_ranks if num_ranks is None else num_ranks
        self._store = peers.open_store(host=host, num_ranks=expected, timeout_s=self._options.peer_timeout_s)
        return Rendezvous(host=host, port=self._store.port, interface=interface, epoch=epoch)

    def join(self, rendezvous: Rendezvous) -> ModelShape:
        """Meet the other ranks of the topology that this one was made with, and serve the placement likewise."""
        placement = self._parallel.table.placement
        self.take_seat(rendezvous, rank=self._rank, num_ranks=self._topology.num_ranks)
        self.serve(placement, self._topology, self._rank)
        return self.shape

    def take_seat(self, rendezvous: Rendezvous, *, rank: int, num_ranks: int) -> None:
        """Meet num_ranks ranks under a later epoch than ever before. Every one must call this at about the same time.

        Raises StaleEpochError for an earlier one, ExchangeError where the others do not come.
        """
        with self._membership:
            if rendezvous.epoch <= self._newest:
                raise StaleEpochError(
                    f"rank {rank} has met under epoch {self._newest}; {rendezvous.epoch} is not later"
                )
            self._newest = rendezvous.epoch
            self.leave()
        met = peers.join(
            rendezvous,
            rank=rank,
            num_ranks=num_ranks,
            device=self._device,
            timeout_s=self._options.peer_timeout_s,
            meeting_timeout_s=self._options.meeting_timeout_s,
            store=self._store if rank == 0 else None,
        )
        with self._membership:
            if self._newest != met.epoch:
                self._parted.append(met)
                raise StaleEpochError(f"rank {rank} met under epoch {met.epoch}, but is asked to epoch {self._newest}")
            self._peers = met
            self._mover = make_movers(
                self._parallel.slab,
                peers=met,
                blob_bytes=self.expert_bytes,
                device=self._device,
                timeout_s=self._options.peer_timeout_s,
                max_bytes_per_s=self._options.migration_bytes_per_s,
            )

    def release_except(self, experts: Iterable[ExpertId]) -> None:
        """Make room: free the blobs of all other experts. For a rank that does not serve."""
        assert self._engine is None
        for expert in self._parallel.slab.experts() - set(experts):
            self._parallel.cache.forget(expert)
            self._parallel.slab.release(expert)

    def restore(self, experts: Iterable[ExpertId]) -> int:
        """Get experts from the checkpoint; returns the bytes read."""
        return restore_experts(self._options, self._parallel.slab, experts, self._source)

    def serve(self, placement: Placement, topology: Topology, rank: int) -> None:
        """Serve a placement with the ranks that were met, as `rank` of topology. Experts it does not need are freed.

        When it returns, kernels are touched and the hot experts are in slots.

        Raises MigrationError where one is missing.
        """
        with self._membership:
            met = self._peers
            if met is None or self._engine is not None:
                raise StaleEpochError(f"rank {rank} has met nobody to serve epoch {placement.epoch} with")
            missing = placement.experts_on(rank) - self._parallel.slab.experts()
            if missing:
                raise MigrationError(
                    f"rank {rank} lacks {len(missing)} experts of epoch {placement.epoch}: {min(missing)}"
                )
            self.release_except(placement.experts_on(rank))
            self._parallel.slab.regard(tiers_on(placement, rank))
            self._parallel.table.take_seat(rank, topology, placement)
            self._parallel.cache.let_go()
            self._epochs = self._epoch_keeper()
            self._desk = self._new_desk()
            self._parallel.attach(met.data, self._recorder, self._clock)
            self._parallel.reserve_kv_cache(self._options.kv_page_size * self._options.kv_pages)
            self._parallel.warm_up()
            steps = ServingSteps(
                parallel=self._parallel,
                epochs=self._epochs,
                recorder=self._recorder,
                clock=self._clock,
                counts=self._counts,
                fail=self._desk.fail,
                # A later founding's steps come after all of an earlier one's, on every rank alike.
                first_step=met.epoch << 32,
            )
            self._desk.engine = start_engine(
                self._parallel.model, self._options, control=met.control, hooks=steps, router=self._desk.router
            )

    def leave(self) -> Holdings:
        """Leave the peers at once, whatever is under way; the events so far can still be taken.

        Raises ExchangeError where this rank's own step does not come to an end.
        """
        with self._membership:
            self._parted = [left for left in self._parted if not left.is_settled]
            if self._peers is not None:
                self._peers.leave()
                self._parted.append(self._peers)
                self._peers, self._mover = None, None
            self._epochs.close()
            if self._engine is not None:
                if not self._engine.break_off(self._options.meeting_timeout_s):
                    raise ExchangeError(f"rank {self._rank} can't leave: its step does not end")
                self._desk.engine = None
                self._recorder.abandon_step()
                if self._device.type == "cuda":
                    # The KV cache hangs in cycles of references, and there is no room for a second one.
                    gc.collect()
                    torch.cuda.empty_cache()
            return Holdings(
                epoch=self._parallel.table.epoch,
                experts=self._parallel.slab.experts(),
                capacity=self._parallel.slab.capacity,
            )

    def stop(self) -> None:
        """Finish what runs, stop in step with the others, and leave the groups."""
        if self._engine is not None:
            self._engine.stop(block=True, timeout=self._options.peer_timeout_s)
        self._recorder.stop()
        if self._peers is not None:
            self._peers.leave()

    # -------------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> None:
        """See `Desk.submit`."""
        self._desk.submit(request)

    def cancel(self, request: str) -> None:
        self._desk.cancel(request)

    def next_events(self, timeout_s: float, founding: int | None = None) -> list[TokenEvent]:
        """See `Desk.next_events`. Raises StaleEpochError for events of another founding (the epoch under which the
        ranks met) than the present one."""
        if founding is not None:
            self.check_founding(founding)
        return self._desk.next_events(timeout_s)

    def check_founding(self, founding: int) -> None:
        """Raises StaleEpochError unless the ranks have met under this epoch."""
        if founding != self._newest:
            raise StaleEpochError(f"rank {self._rank} has met under epoch {self._newest}, not {founding}")

    # -------------------------------------------------------------------------------------------- change of epoch

    def copy_round(self, target_epoch: int, moves: Sequence[Move]) -> int:
        """This rank's share of one round of a migration to an epoch ahead. Returns the bytes received."""
        self._epochs.check_ahead(target_epoch)
        mover = self._mover
        if mover is None:
            raise MigrationError(f"rank {self._rank} has left its peers and can't copy for epoch {target_epoch}")
        return mover.copy_round(target_epoch, moves)

    def prepare(self, target: Placement) -> None:
        self._epochs.prepare(target)

    def commit(self, epoch: int) -> None:
        self._epochs.commit(epoch)

    def await_epoch(self, epoch: int, timeout_s: float) -> None:
        self._epochs.await_epoch(epoch, timeout_s)

    def abort(self, epoch: int) -> int:
        return self._epochs.abort(epoch)

    def drop(self, epoch: int) -> int:
        return self._epochs.drop(epoch)

    # ------------------------------------------------------------------------------------------------- looking in

    def pulse(self) -> Pulse:
        """A sign of life, at once."""
        met, engine = self._peers, self._engine
        error = None if engine is None else engine.background_thread_status.fatal_error
        moved_at = 0.0 if met is None else max(met.data.moved_at, met.control.moved_at)
        still_s = time.monotonic() - moved_at
        return Pulse(
            epoch=self._parallel.table.epoch,
            serving=engine is not None and engine.is_running(),
            waiting=met is not None and (met.data.waiting or met.control.waiting),
            still_s=still_s,
            at="" if engine is None or still_s < WORTH_A_LOOK_S else engine.where(),
            error=None if error is None else str(error),
            write_errors=self._recorder.counters.write_errors,
        )

    def status(self) -> WorkerStatus:
        engine = self._engine
        error = None if engine is None else engine.background_thread_status.fatal_error
        cache, recorder = self._parallel.cache, self._recorder.counters
        return WorkerStatus(
            rank=self._rank,
            epoch=self._parallel.table.epoch,
            alive=engine is not None and engine.is_running(),
            error=None if error is None else str(error),
            steps=self._counts.steps,
            experts=len(self._parallel.slab.experts()),
            host_slab_bytes=self._parallel.slab.num_bytes,
            slot_bytes=cache.num_bytes,
            cache={name: getattr(cache.counters, name) for name in type(cache.counters).__slots__}
            | self._parallel.slab.figures(),
            recorder={name: getattr(recorder, name) for name in type(recorder).__slots__},
            traffic=asdict(self._parallel.table.traffic),
            tokens=self._counts.tokens,
            step_s=self._clock.total_s,
        )

    def recent_steps(self) -> list[StepSeconds]:
        """How long the last steps took, oldest first."""
        return self._clock.recent()

    def flush_trace(self) -> None:
        """Write what was recorded so far to disk."""
        self._recorder.flush()
