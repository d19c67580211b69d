"""The Ray actors: thin shells around the plain classes, and the only place that makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from cluster.drifting import DriftCheck
from cluster.gateway.relay import Relay
from cluster.history import History
from cluster.service import PlacementService, RebalanceResult
from placement.core import Placement
from placement.errors import MigrationError, MoetisError
from placement.migration import Move
from placement.planfile import Plan
from placement.topology import Topology
from workers.events import TokenEvent
from workers.loading import ModelShape
from workers.options import WorkerOptions
from workers.peers import Rendezvous
from workers.requests import GenerationRequest
from workers.step_clock import StepSeconds
from workers.worker import ExpertWorker, WorkerStatus

SERVICE_NAME = "placement-service"
CALL_TIMEOUT_S = 300.0


class WorkerActor:
    """One ExpertWorker as a Ray actor; its methods are the worker's."""

    def __init__(self, options: WorkerOptions, rank: int, topology: Topology, placement: Placement) -> None:
        self._worker = ExpertWorker(options, rank=rank, topology=topology, placement=placement)

    def open_rendezvous(self, host: str, interface: str) -> Rendezvous:
        return self._worker.open_rendezvous(host=host, interface=interface)

    def join(self, rendezvous: Rendezvous) -> ModelShape:
        return self._worker.join(rendezvous)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[str | None]:
        """For each request None, or why it was refused."""
        return [self._refusal(request) for request in requests]

    def _refusal(self, request: GenerationRequest) -> str | None:
        try:
            self._worker.submit(request)
        except MoetisError as error:
            return str(error)
        return None

    def cancel(self, request: str) -> None:
        self._worker.cancel(request)

    def next_events(self, timeout_s: float) -> list[TokenEvent]:
        return self._worker.next_events(timeout_s)

    def copy_round(self, target_epoch: int, moves: Sequence[Move]) -> int:
        return self._worker.copy_round(target_epoch, moves)

    def prepare(self, target: Placement) -> None:
        self._worker.prepare(target)

    def commit(self, epoch: int) -> None:
        self._worker.commit(epoch)

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


@dataclass(frozen=True, slots=True)
class RayRanks:
    """The service's road to the workers. A failing rank fails the call as MigrationError."""

    workers: Sequence[ActorHandle[Any]]

    def call(self, method: str, arguments: Iterable[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        refs = [getattr(self.workers[rank], method).remote(*values) for rank, values in arguments]
        try:
            return list(ray.get(refs, timeout=CALL_TIMEOUT_S))
        except RayTaskError as error:
            raise MigrationError(f"{method}: {error.cause}") from error
        except (RayActorError, GetTimeoutError) as error:
            raise MigrationError(f"{method}: a rank does not answer: {str(error).splitlines()[0]}") from error


class PlacementServiceActor:
    """The PlacementService as a Ray actor. progress() answers while a rebalance runs."""

    def __init__(
        self,
        history: Path,
        workers: Sequence[ActorHandle[Any]],
        initial: Plan,
        trace_dir: Path,
        min_gain: float,
        seed: int,
        window_tokens: int,
    ) -> None:
        self._progress = "idle"
        self._service = PlacementService(
            history=History(history),
            ranks=RayRanks(workers),
            initial=initial,
            trace_dir=trace_dir,
            min_gain=min_gain,
            seed=seed,
            window_tokens=window_tokens,
        )

    def rebalance(self) -> RebalanceResult:
        try:
            return self._service.rebalance(self._note)
        finally:
            self._progress = "idle"

    def preview(self) -> RebalanceResult:
        try:
            return self._service.preview(self._note)
        finally:
            self._progress = "idle"

    def drift(self) -> DriftCheck:
        return self._service.drift()

    def _note(self, text: str) -> None:
        self._progress = text

    def progress(self) -> str:
        return self._progress

    def statuses(self) -> list[WorkerStatus]:
        return self._service.statuses()

    def current(self) -> Plan:
        return self._service.current


def start_workers(
    options: WorkerOptions, *, topology: Topology, placement: Placement, num_gpus: float
) -> list[ActorHandle[Any]]:
    """One actor a rank. Threads: events, requests, migration and status must not wait for each other."""
    remote = ray.remote(WorkerActor).options(num_cpus=1, num_gpus=num_gpus, max_concurrency=8)
    return [remote.remote(options, rank, topology, placement) for rank in range(topology.num_ranks)]


def start_service(
    *,
    history: Path,
    workers: Sequence[ActorHandle[Any]],
    initial: Plan,
    trace_dir: Path,
    min_gain: float,
    seed: int,
    window_tokens: int,
) -> ActorHandle[Any]:
    """The placement service, by the name under which `moetis rebalance` finds it."""
    remote = ray.remote(PlacementServiceActor).options(name=SERVICE_NAME, num_cpus=0, max_concurrency=4)
    return remote.remote(history, workers, initial, trace_dir, min_gain, seed, window_tokens)


def start_relay(*, max_requests: int, max_tokens: int) -> ActorHandle[Any]:
    """The gateway's relay. One that dies comes back empty: what was under way ends, and new requests are served."""
    remote = ray.remote(Relay).options(num_cpus=0, max_concurrency=1000, max_restarts=-1)
    return remote.remote(max_requests=max_requests, max_tokens=max_tokens)
