"""A worker as a Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.core import ExpertId, Placement
from placement.errors import RequestError
from placement.migration import Move
from placement.topology import Topology
from workers.events import TokenEvent
from workers.loading import ModelShape
from workers.options import WorkerOptions
from workers.peers import Rendezvous
from workers.requests import GenerationRequest
from workers.step_clock import StepSeconds
from workers.vitals import Holdings, Pulse, WorkerStatus
from workers.worker import ExpertWorker


class WorkerActor:
    """One ExpertWorker as a Ray actor; its methods are the worker's."""

    def __init__(self, options: WorkerOptions, rank: int, topology: Topology, placement: Placement) -> None:
        self._worker = ExpertWorker(options, rank=rank, topology=topology, placement=placement)

    def ready(self) -> tuple[ModelShape, str, int]:
        """Answers once the model is loaded: what it serves, on which host, in which process."""
        return self._worker.shape, socket.gethostname(), os.getpid()

    def pulse(self) -> Pulse:
        return self._worker.pulse()

    def open_rendezvous(self, host: str, interface: str, epoch: int, num_ranks: int) -> Rendezvous:
        here = ray.util.get_node_ip_address() if host == "auto" else host
        return self._worker.open_rendezvous(host=here, interface=interface, epoch=epoch, num_ranks=num_ranks)

    def take_seat(self, rendezvous: Rendezvous, rank: int, num_ranks: int) -> None:
        self._worker.take_seat(rendezvous, rank=rank, num_ranks=num_ranks)

    def release_except(self, experts: frozenset[ExpertId]) -> None:
        self._worker.release_except(experts)

    def restore(self, experts: frozenset[ExpertId]) -> int:
        return self._worker.restore(experts)

    def serve(self, placement: Placement, topology: Topology, rank: int) -> None:
        self._worker.serve(placement, topology, rank)

    def leave(self) -> Holdings:
        return self._worker.leave()

    def submit(self, requests: Sequence[GenerationRequest], founding: int) -> list[str | None]:
        """For each request None, or why it was refused. Raises StaleEpochError for requests to another founding."""
        self._worker.check_founding(founding)
        return [self._refusal(request) for request in requests]

    def _refusal(self, request: GenerationRequest) -> str | None:
        try:
            self._worker.submit(request)
        except RequestError as error:
            return str(error)
        return None

    def cancel(self, request: str) -> None:
        self._worker.cancel(request)

    def next_events(self, timeout_s: float, founding: int) -> list[TokenEvent]:
        return self._worker.next_events(timeout_s, founding)

    def copy_round(self, target_epoch: int, moves: Sequence[Move]) -> int:
        return self._worker.copy_round(target_epoch, moves)

    def prepare(self, target: Placement) -> None:
        self._worker.prepare(target)

    def commit(self, epoch: int) -> None:
        self._worker.commit(epoch)

    def await_epoch(self, epoch: int, timeout_s: float) -> None:
        self._worker.await_epoch(epoch, timeout_s)

    def abort(self, epoch: int) -> int:
        return self._worker.abort(epoch)

    def drop(self, epoch: int) -> int:
        return self._worker.drop(epoch)

    def flush_trace(self) -> None:
        self._worker.flush_trace()

    def status(self) -> WorkerStatus:
        return self._worker.status()

    def recent_steps(self) -> list[StepSeconds]:
        return self._worker.recent_steps()

    def expert_bytes(self) -> int:
        return self._worker.expert_bytes

    def stop(self) -> None:
        self._worker.stop()


def start_worker(
    options: WorkerOptions,
    *,
    name: str,
    seat: int,
    topology: Topology,
    placement: Placement,
    num_gpus: float,
    place: PlacementGroupSchedulingStrategy,
) -> ActorHandle[Any]:
    """The actor of a seat, in its bundle.

    Threads: events, requests, migration and signs of life must not wait for each other.
    """
    remote = ray.remote(WorkerActor).options(
        name=name, num_cpus=1, num_gpus=num_gpus, max_concurrency=12, scheduling_strategy=place
    )
    return remote.remote(options, seat, topology, placement)
