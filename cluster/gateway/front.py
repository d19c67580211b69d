"""The fleet's side of the relay: takes asks, chooses homes, hands requests to the fleet, and brings back what comes.

This is all that the gateway knows of the fleet: submit, cancel, status, plan.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.fleet import Generation
from cluster.gateway.homes import Homes
from cluster.gateway.relay import Ask, FleetState, Piece
from placement.errors import MoetisError, TraceError
from placement.planfile import Plan
from placement.routing import TokenTable, build_token_table
from placement.topology import Topology
from placement.trace import RoutingTrace, concatenate, read_segment
from workers.events import TokenEvent
from workers.requests import GenerationRequest
from workers.vitals import WorkerStatus

TAKE_WAIT_S = 1.0
WATCH_EVERY_S = 2.0
TABLE_TOKENS = 200_000


class FleetPort(Protocol):
    """What the front needs of a fleet."""

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        homes: Sequence[int] | None = None,
        *,
        events: queue.SimpleQueue[Any] | None = None,
    ) -> list[Generation]: ...

    def cancel(self, generation: Generation) -> None: ...

    def status(self) -> list[WorkerStatus]: ...

    def plan(self) -> Plan: ...


class _RelayLost:
    """The relay died and comes back empty."""


# Asks and withdrawals from the relay, events from the fleet, and what ended either.
Inbox = queue.SimpleQueue[Ask | str | TokenEvent | MoetisError | _RelayLost]


class Front:
    """Serves what the relay brings, in the thread that calls run; two threads wait for the relay and look at the fleet.

    An event that comes for a request is passed on at once, together with all others that have come by then.
    """

    def __init__(
        self, fleet: FleetPort, relay: ActorHandle[Any], topology: Topology, inbox: Inbox, *, trace_dir: Path
    ) -> None:
        self._fleet = fleet
        self._relay = relay
        self._inbox = inbox
        self._homes = Homes(topology)
        self._trace_dir = trace_dir
        self._running: dict[str, Generation] = {}
        self._stopping = threading.Event()
        self._state = FleetState(ready=True, reason="", ranks=topology.num_ranks)

    def run(self) -> None:
        """Until an error ends the fleet, which is raised, or a signal this process."""
        threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("asks", self._take), ("watch", self._watch))
        ]
        for thread in threads:
            thread.start()
        try:
            while True:
                self._handle([self._inbox.get(), *self._what_else()])
        finally:
            self._stopping.set()
            self._relay.set_state.remote(FleetState(reason="the cluster is going down"))

    def _what_else(self) -> list[Any]:
        items = []
        while not self._inbox.empty():
            items.append(self._inbox.get())
        return items

    def _handle(self, items: Sequence[Any]) -> None:
        asks: list[Ask] = []
        pieces: list[Piece] = []
        for item in items:
            if isinstance(item, Ask):
                asks.append(item)
            elif isinstance(item, TokenEvent):
                pieces.append(self._piece(item))
        if asks:
            self._submit(asks)
        for item in items:
            if isinstance(item, str) and item in self._running:
                self._fleet.cancel(self._running[item])
            elif isinstance(item, _RelayLost):
                for generation in list(self._running.values()):
                    self._fleet.cancel(generation)
        if pieces:
            self._relay.deliver.remote(pieces)
        for item in items:
            if isinstance(item, MoetisError):
                raise item

    def _submit(self, asks: Sequence[Ask]) -> None:
        requests = [ask.request for ask in asks]
        homes = [self._homes.choose(ask.request.prompt, ask.session) for ask in asks]
        generations = self._fleet.submit(requests, homes, events=self._inbox)
        self._running.update({generation.request: generation for generation in generations})

    def _piece(self, event: TokenEvent) -> Piece:
        if event.end is not None:
            generation = self._running.pop(event.request, None)
            if generation is not None:
                self._homes.finish(generation.home)
        return Piece(request=event.request, tokens=event.tokens, end=event.end, error=event.error)

    # ------------------------------------------------------------------------------------------------ other threads

    def _take(self) -> None:
        while not self._stopping.is_set():
            try:
                for item in ray.get(self._relay.take.remote(TAKE_WAIT_S)):
                    self._inbox.put(item)
            except RayError:
                self._inbox.put(_RelayLost())
                self._stopping.wait(TAKE_WAIT_S)

    def _watch(self) -> None:
        epoch = None
        while True:
            self._state, known = self._look(), epoch
            if self._stopping.is_set():
                return
            self._relay.set_state.remote(self._state)
            epoch = self._state.epoch
            if epoch != known:
                self._learn()
            if self._stopping.wait(WATCH_EVERY_S):
                return

    def _look(self) -> FleetState:
        """Requests are taken also while workers come back: they wait rather than fail."""
        try:
            statuses = self._fleet.status()
        except (MoetisError, RayError):
            return FleetState(ready=True, reason="", epoch=self._state.epoch, ranks=self._state.ranks)
        return FleetState(
            ready=True,
            reason="",
            epoch=max(status.epoch for status in statuses),
            ranks=len(statuses),
            ranks_alive=sum(status.alive for status in statuses),
            steps=max(status.steps for status in statuses),
        )

    def _learn(self) -> None:
        table = learn_table(self._fleet.plan, self._trace_dir)
        if table is not None:
            self._homes.learn(table)


def learn_table(plan: Callable[[], Plan], trace_dir: Path) -> TokenTable | None:
    """What token ids say of homes under the plan that serves, from the newest of the trace; None without a trace."""
    try:
        trace = newest_trace(trace_dir, TABLE_TOKENS)
        if trace is None:
            return None
        served = plan()
        return build_token_table(served.placement, served.topology, trace)
    except (TraceError, MoetisError, RayError):
        # A segment that was just dropped, or a fleet that is changing: homes stay as they are until the next epoch.
        return None


def newest_trace(folder: Path, num_tokens: int) -> RoutingTrace | None:
    """The newest segments of a trace folder, of about num_tokens tokens. Raises TraceError for a broken one."""
    segments = sorted(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    taken: list[RoutingTrace] = []
    for segment in segments:
        if sum(trace.num_tokens for trace in taken) >= num_tokens:
            break
        taken.append(read_segment(segment))
    return concatenate(taken, source=str(folder)) if taken else None
