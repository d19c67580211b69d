"""The fleet: a running set of workers and its placement service, seen from the process that serves.

Requests go to a home rank and come back as events; one thread a rank takes them. Homes are given out in turn, so that
ranks get the same number of requests.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.actors import CALL_TIMEOUT_S, start_service, start_workers
from cluster.config import ClusterConfig
from cluster.devices import choose_device
from cluster.history import History
from cluster.service import RebalanceResult
from cluster.starting import history_path, starting_plan
from placement.errors import MoetisError
from placement.planfile import Plan
from placement.topology import load_topology
from workers.events import FAILED, TokenEvent
from workers.requests import GenerationRequest
from workers.step_clock import StepSeconds
from workers.worker import WorkerStatus

EVENT_WAIT_S = 0.5
STOP_TIMEOUT_S = 20.0
STATUS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A request under way: its events as they come, or all of its tokens at the end."""

    request: str
    home: int
    _events: queue.SimpleQueue[TokenEvent]

    def events(self) -> Iterator[TokenEvent]:
        """Each event, the last one being that with an end."""
        while True:
            event = self._events.get()
            yield event
            if event.end is not None:
                return

    def tokens(self) -> tuple[int, ...]:
        """Wait for the end; the tokens. Raises MoetisError where the request failed or was cancelled."""
        tokens: list[int] = []
        for event in self.events():
            tokens.extend(event.tokens)
            if event.end not in (None, "finished"):
                raise MoetisError(f"request '{self.request}' {event.end}: {event.error or 'on request'}")
        return tuple(tokens)


class Fleet:
    """Workers and service of one cluster, inside a Ray session that the caller holds open.

    No rank can serve without the others, so one that is lost ends all requests. failed is then told why, once.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        note: Callable[[str], None] = lambda text: None,
        failed: Callable[[MoetisError], None] = lambda error: None,
    ) -> None:
        self.topology = load_topology(config.topology)
        self.initial = starting_plan(config, self.topology, History(history_path(config)))
        self._homes = itertools.cycle(range(self.topology.num_ranks))
        self._running: dict[str, Generation] = {}
        self._lock = threading.Lock()
        self._failed = failed
        self._lost = False
        self._stopping = threading.Event()
        note(f"starting {self.topology.num_ranks} workers")
        config.run_dir.mkdir(parents=True, exist_ok=True)
        device = choose_device(
            config.workers.device,
            num_ranks=self.topology.num_ranks,
            num_gpus=ray.cluster_resources().get("GPU", 0),
        )
        self._workers = start_workers(
            replace(config.worker_options(), device=device),
            topology=self.topology,
            placement=self.initial.placement,
            num_gpus=1 if device == "cuda" else 0,
        )
        self._service = start_service(
            history=history_path(config),
            workers=self._workers,
            initial=self.initial,
            trace_dir=config.trace_dir.absolute(),
            min_gain=config.rebalance.min_gain,
            seed=config.rebalance.seed,
            window_tokens=config.rebalance.window_tokens,
        )
        note("loading the model on every rank")
        first = self._workers[0].open_rendezvous.remote(config.workers.host, config.workers.interface)
        rendezvous = answer(first)
        self.shape = answer([worker.join.remote(rendezvous) for worker in self._workers])[0]
        note("starting the placement service")
        answer(self._service.current.remote())
        self._pumps = [
            threading.Thread(target=self._pump, args=(rank,), name=f"events-{rank}", daemon=True)
            for rank in range(self.topology.num_ranks)
        ]
        for pump in self._pumps:
            pump.start()

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        homes: Sequence[int] | None = None,
        *,
        events: queue.SimpleQueue[Any] | None = None,
    ) -> list[Generation]:
        """Send each request to its home, in turn unless given. A refused one ends at once, with the reason.

        events: one queue for the events of all these requests, in place of one for each.
        """
        chosen = homes if homes is not None else [next(self._homes) for _ in requests]
        generations = [
            Generation(request.request, home, events if events is not None else queue.SimpleQueue())
            for request, home in zip(requests, chosen, strict=True)
        ]
        with self._lock:
            self._running.update({generation.request: generation for generation in generations})
        by_home: dict[int, list[GenerationRequest]] = {}
        for request, generation in zip(requests, generations, strict=True):
            by_home.setdefault(generation.home, []).append(request)
        refs = {home: self._workers[home].submit.remote(mine) for home, mine in by_home.items()}
        for home, ref in refs.items():
            try:
                refusals = ray.get(ref, timeout=CALL_TIMEOUT_S)
            except RayError as error:
                self._fail(home, error)
                break
            for request, refusal in zip(by_home[home], refusals, strict=True):
                if refusal is not None:
                    self._deliver(TokenEvent(request=request.request, tokens=(), end=FAILED, error=refusal))
        return generations

    def cancel(self, generation: Generation) -> None:
        try:
            ray.get(self._workers[generation.home].cancel.remote(generation.request), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            self._fail(generation.home, error)

    def rebalance(self) -> RebalanceResult:
        """Plan from the trace so far and enact it beside the traffic; returns when it is done."""
        result: RebalanceResult = answer(self._service.rebalance.remote())
        return result

    def plan(self) -> Plan:
        """The plan of the epoch that is served."""
        plan: Plan = answer(self._service.current.remote())
        return plan

    def progress(self) -> str:
        text: str = answer(self._service.progress.remote())
        return text

    def status(self) -> list[WorkerStatus]:
        result: list[WorkerStatus] = answer([worker.status.remote() for worker in self._workers])
        return result

    def recent_steps(self) -> list[list[StepSeconds]]:
        """How long each rank's last steps took, by rank."""
        result: list[list[StepSeconds]] = answer([worker.recent_steps.remote() for worker in self._workers])
        return result

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._kill()

    def stop(self) -> None:
        """Let every rank finish and leave in step, then end the actors."""
        self._stopping.set()
        refs = [worker.stop.remote() for worker in self._workers]
        ray.wait(refs, num_returns=len(refs), timeout=STOP_TIMEOUT_S)
        self._kill()

    def _kill(self) -> None:
        self._stopping.set()
        for actor in [*self._workers, self._service]:
            ray.kill(actor)

    def _pump(self, rank: int) -> None:
        while not self._stopping.is_set():
            try:
                for event in ray.get(self._workers[rank].next_events.remote(EVENT_WAIT_S)):
                    self._deliver(event)
            except RayError as error:
                self._fail(rank, error)
                return

    def _deliver(self, event: TokenEvent) -> None:
        with self._lock:
            generation = self._running.get(event.request)
            if generation is not None and event.end is not None:
                del self._running[event.request]
        if generation is not None:
            generation._events.put(event)

    def _fail(self, rank: int, error: RayError) -> None:
        """A rank is gone or has stopped serving: every request ends."""
        if self._stopping.is_set():
            return
        reason = self._reason(rank, error)
        with self._lock:
            first, self._lost = not self._lost, True
            running = list(self._running)
        for request in running:
            self._deliver(TokenEvent(request=request, tokens=(), end=FAILED, error=reason))
        if first:
            self._failed(MoetisError(reason))

    def _reason(self, rank: int, error: RayError) -> str:
        """The rank whose process died, where one did: the others only say that they lost it."""
        for other, worker in enumerate(self._workers):
            try:
                ray.get(worker.status.remote(), timeout=STATUS_TIMEOUT_S)
            except RayActorError:
                return f"the process of rank {other} died; the other ranks cannot serve without it"
            except RayError:
                continue
        cause = error.cause if isinstance(error, RayTaskError) else error
        return f"rank {rank} stopped serving: {str(cause).splitlines()[0]}"


def answer(refs: Any) -> Any:
    """ray.get, with the worker's own error instead of Ray's wrapping of it."""
    try:
        return ray.get(refs, timeout=600)
    except RayTaskError as error:
        if isinstance(error.cause, MoetisError):
            raise error.cause from None
        raise MoetisError(f"a worker failed: {error.cause!r}") from error
    except RayActorError as error:
        cause = getattr(error, "cause", None)
        raise MoetisError(f"a worker died: {cause or str(error).splitlines()[0]}") from error
    except GetTimeoutError as error:
        raise MoetisError("the workers do not answer") from error
