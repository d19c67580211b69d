"""The crew: the actor of every seat that is taken, started, asked after, and ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup

from cluster.actors.worker import start_worker
from cluster.history import Member
from cluster.seating import seat_strategy
from placement.core import Placement
from placement.topology import Topology
from workers.options import WorkerOptions

# How Ray titles the processes of our workers.
ACTOR_TITLE = "ray::WorkerActor"


@dataclass(frozen=True, slots=True)
class Hand:
    """One actor on one seat. ready answers (ModelShape, host, process id) once its model is loaded."""

    member: Member
    actor: ActorHandle[Any]
    ready: Any


class Crew:
    """Starts and ends the actors of a cluster's seats."""

    def __init__(
        self, options: WorkerOptions, topology: Topology, *, name: str, num_gpus: float, group: PlacementGroup
    ) -> None:
        self._options = options
        self._topology = topology
        self._name = name
        self._num_gpus = num_gpus
        self._group = group

    def start(self, seat: int, placement: Placement) -> Hand:
        """An actor that loads its share of a placement for all seats."""
        name = f"{self._name}-seat-{seat}-{secrets.token_hex(4)}"
        actor = start_worker(
            self._options,
            name=name,
            seat=seat,
            topology=self._topology,
            placement=placement,
            num_gpus=self._num_gpus,
            place=seat_strategy(self._group, seat),
        )
        return Hand(Member(seat=seat, actor=name), actor, actor.ready.remote())


def ask(
    hands: Iterable[Hand], call: Callable[[ActorHandle[Any]], Any], timeout_s: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """One call on each: the answers by seat, and for the seats that give none in time, why."""
    refs = {hand.member.seat: call(hand.actor) for hand in hands}
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    answers: dict[int, Any] = {}
    silent: dict[int, str] = {}
    for seat, ref in refs.items():
        try:
            answers[seat] = ray.get(ref, timeout=0)
        except GetTimeoutError:
            silent[seat] = f"it gave no answer for {timeout_s:.0f} s"
        except RayError as error:
            silent[seat] = reason_of(error)
    return answers, silent


def reason_of(error: RayError) -> str:
    cause = getattr(error, "cause", None)
    told = cause if isinstance(cause, Exception) else error
    return (str(told).splitlines() or [repr(told)])[0]


def dismiss(hands: Iterable[Hand]) -> None:
    """End actors, however they are. A stopped process does not hear Ray; on this host it is killed by its number."""
    for hand in hands:
        ray.kill(hand.actor)
        done, _ = ray.wait([hand.ready], timeout=0)
        if done:
            with contextlib.suppress(RayError, OSError):
                _, host, pid = ray.get(hand.ready)
                if host == socket.gethostname() and ACTOR_TITLE in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
