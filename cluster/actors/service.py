"""The placement service as a Ray actor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from cluster.actors.nearby import on_this_node
from cluster.actors.road import CALL_TIMEOUT_S, connect
from cluster.drifting import DriftCheck
from cluster.forming import Meeting
from cluster.history import History, Member
from cluster.local_ray import SERVICE_NAME
from cluster.outcomes import Formed, RebalanceResult
from cluster.service import PlacementService
from placement.errors import ConfigError, MigrationError
from placement.planfile import Plan
from workers.vitals import WorkerStatus

NICENESS = 10


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

    def rebalance(self, is_gated: bool = True, most_copies: int | None = None) -> RebalanceResult:
        try:
            return self._service.rebalance(self._note, is_gated=is_gated, most_copies=most_copies)
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

    def preview(self, most_copies: int | None = None) -> RebalanceResult:
        try:
            return self._service.preview(self._note, most_copies=most_copies)
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
        scheduling_strategy=on_this_node(),
    )
    return remote.remote(history, initial, trace_dir, min_gain, seed, window_tokens, meeting)


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
