"""The service's road to the workers, over Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from cluster.history import Member
from placement.errors import MigrationError

CALL_TIMEOUT_S = 300.0


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
