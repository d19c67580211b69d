"""The Ray actors: thin shells around the plain classes, and the only place that makes them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.drifting import DriftCheck
from cluster.forming import Meeting
from cluster.gateway.relay import Relay
from cluster.history import History, Member
from cluster.service import Formed, PlacementService, RebalanceResult
from placement.core import ExpertId, Placement
from placement.errors import ConfigError, MigrationError, RequestError
from placement.migration import Move
from placement.planfile import Plan
from placement.topology import Topology
from workers.events import TokenEvent
from workers.loading import ModelShape
from workers.options import WorkerOptions
from workers.peers import Rendezvous
from workers.requests import GenerationRequest
from workers.step_clock import StepSeconds
from workers.vitals import Holdings, Pulse, WorkerStatus
from workers.worker import ExpertWorker

SERVICE_NAME = "placement-service"
CALL_TIMEOUT_S = 300.0
NICENESS = 10


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


def connect(members: Sequence[Member]) -> RayRanks:
    """The road to actors by their names. Raises MigrationError where one is gone."""
    try:
        return RayRanks([ray.get_actor(member.actor) for member in members])
    except ValueError as error:
        raise MigrationError(f"a rank is gone: {str(error).splitlines()[0]}") from error


class PlacementServiceActor:
    """The PlacementService as a Ray actor. progress() answers while a rebalance runs.

    Ray starts it again when its process dies; it then takes up what its history says.
    """

    def __init__(
        self,
        history: Path,
        initial: Plan,
        trace_dir: Path,
        min_gain: float,
        seed: int,
        window_tokens: int,
        meeting: Meeting,
    ) -> None:
        # Planning takes whole seconds of a core, and tokens come first.
        os.nice(NICENESS)
        self._progress = "idle"
        self._service = PlacementService(
            history=History(history),
            connect=connect,
            initial=initial,
            trace_dir=trace_dir,
            min_gain=min_gain,
            seed=seed,
            window_tokens=window_tokens,
            meeting=meeting,
        )
        if ray.get_runtime_context().was_current_actor_reconstructed:
            with contextlib.suppress(MigrationError):
                self._service.resume()

    def rebalance(self, is_gated: bool = True) -> RebalanceResult:
        try:
            return self._service.rebalance(self._note, is_gated=is_gated)
        finally:
            self._progress = "idle"

    def form(self, members: Sequence[Member], reason: str) -> Formed:
        try:
            return self._service.form(members, reason, self._note)
        finally:
            self._progress = "idle"

    def vacate(self, seats: Sequence[int]) -> None:
        try:
            self._service.vacate(seats, self._note)
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

    def members(self) -> tuple[Member, ...]:
        return self._service.members

    def plan_for(self, seats: Sequence[int]) -> Plan:
        return self._service.plan_for(seats)

    def want(self, seats: Sequence[int]) -> None:
        self._service.history.want(seats)

    def wanted(self) -> tuple[int, ...]:
        return self._service.history.wanted()

    def history_path(self) -> Path:
        return self._service.history.path


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


def start_service(
    *, history: Path, initial: Plan, trace_dir: Path, min_gain: float, seed: int, window_tokens: int, meeting: Meeting
) -> ActorHandle[Any]:
    """The placement service, by the name under which `moetis rebalance` finds it. It outlives its maker until it is
    killed; one that an earlier maker with the same history left behind makes room. Raises ConfigError for another."""
    _make_room(history)
    remote = ray.remote(PlacementServiceActor).options(
        name=SERVICE_NAME,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        max_concurrency=8,
        scheduling_strategy=_on_this_node(),
    )
    return remote.remote(history, initial, trace_dir, min_gain, seed, window_tokens, meeting)


def _on_this_node() -> NodeAffinitySchedulingStrategy:
    """For what shares files and a fate with the process that serves: a link that is cut must not part them."""
    return NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)


def _make_room(history: Path) -> None:
    try:
        left = ray.get_actor(SERVICE_NAME)
    except ValueError:
        return
    try:
        its = ray.get(left.history_path.remote(), timeout=CALL_TIMEOUT_S)
    except (RayActorError, GetTimeoutError):
        its = history
    if its != history:
        raise ConfigError(f"another Moetis cluster serves on this Ray cluster, with the history '{its}'; end it first")
    ray.kill(left)


def start_relay(*, max_requests: int, max_tokens: int) -> ActorHandle[Any]:
    """The gateway's relay. One that dies comes back empty: what was under way ends, and new requests are served."""
    remote = ray.remote(Relay).options(
        num_cpus=0, max_concurrency=1000, max_restarts=-1, scheduling_strategy=_on_this_node()
    )
    return remote.remote(max_requests=max_requests, max_tokens=max_tokens)
