"""What `moetis top` looks at: a running cluster's service and ranks, and what came of them between two looks."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from placement.errors import MoetisError
from placement.planfile import Plan
from workers.vitals import WorkerStatus

LOOK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One moment of a cluster. at: seconds of a clock that only grows; problem: why the ranks' statuses are missing."""

    at: float
    plan: Plan
    progress: str
    ranks: tuple[WorkerStatus, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What happened between two looks, or since the start. None where nothing was routed or looked up.

    load [rank]: pairs served over the ranks' mean; hit_rate [rank]; nodes_visited, ranks_visited: per token and layer.
    """

    seconds: float | None
    tokens_per_s: float | None
    steps_per_s: float | None
    nodes_visited: float | None
    ranks_visited: float | None
    load: tuple[float | None, ...]
    hit_rate: tuple[float | None, ...]
    total_hit_rate: float | None

    @property
    def load_max_over_mean(self) -> float | None:
        known = [load for load in self.load if load is not None]
        return max(known) if known else None


def look(service: ActorHandle[Any]) -> Look:
    """Raises MoetisError where the service is gone; ranks that don't answer are a problem to be shown."""
    plan, progress = _ask([service.current.remote(), service.progress.remote()])
    try:
        ranks, problem = tuple(_ask(service.statuses.remote())), None
    except MoetisError as error:
        ranks, problem = (), str(error)
    return Look(at=time.monotonic(), plan=plan, progress=progress, ranks=ranks, problem=problem)


def _ask(refs: Any) -> Any:
    try:
        return ray.get(refs, timeout=LOOK_TIMEOUT_S)
    except RayTaskError as error:
        raise MoetisError(str(error.cause).splitlines()[0]) from error
    except GetTimeoutError as error:
        raise MoetisError(f"no answer within {LOOK_TIMEOUT_S:g} s") from error
    except RayActorError as error:
        raise MoetisError("the placement service is gone: has the cluster ended?") from error


def rates_between(now: Look, before: Look | None) -> Rates:
    """The difference of two looks; since the ranks started where there is no earlier one, or it had other ranks."""
    same = before is not None and [one.rank for one in before.ranks] == [one.rank for one in now.ranks]
    old = before if same else None
    seconds = None if old is None else now.at - old.at
    tokens = _grown(now, old, "traffic", "tokens")
    lookups, hits = _grown(now, old, "cache", "lookups"), _grown(now, old, "cache", "hits")
    pairs = _grown(now, old, "traffic", "pairs")
    steps = max((one.steps for one in now.ranks), default=0) - max((one.steps for one in old.ranks) if old else [0])
    mean = sum(pairs) / len(pairs) if pairs else 0.0
    layers = now.plan.placement.num_layers
    return Rates(
        seconds=seconds,
        tokens_per_s=sum(tokens) / layers / seconds if seconds else None,
        steps_per_s=steps / seconds if seconds else None,
        nodes_visited=_over(sum(_grown(now, old, "traffic", "nodes_visited")), sum(tokens)),
        ranks_visited=_over(sum(_grown(now, old, "traffic", "ranks_visited")), sum(tokens)),
        load=tuple(_over(count, mean) for count in pairs),
        hit_rate=tuple(_over(hit, lookup) for hit, lookup in zip(hits, lookups, strict=True)),
        total_hit_rate=_over(sum(hits), sum(lookups)),
    )


def _grown(now: Look, before: Look | None, part: str, name: str) -> Sequence[float]:
    """By how much a counter of each rank grew. One that was started again counts from 0."""
    ends = [float(getattr(one, part)[name]) for one in now.ranks]
    starts = [0.0] * len(ends) if before is None else [float(getattr(one, part)[name]) for one in before.ranks]
    return [end - start if end >= start else end for end, start in zip(ends, starts, strict=True)]


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def copied_share(progress: str) -> float | None:
    """How far the rounds of a migration are, from the service's own words; None where none is under way."""
    found = re.fullmatch(r"copying round (\d+) of (\d+)", progress)
    return None if found is None else (int(found[1]) - 1) / int(found[2])
