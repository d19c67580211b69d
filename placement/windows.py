"""Drift: a trace cut into windows of time, each served by what was planned from the windows before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.baselines import eplb_placement
from placement.core import Placement
from placement.errors import ConfigError, TraceError
from placement.evaluate import evaluate
from placement.graph import count_load
from placement.homes import random_homes
from placement.plan import plan_placement
from placement.relevel import relevel
from placement.replan import num_copies_between
from placement.topology import Topology
from placement.trace import RoutingTrace, concatenate

NEVER = 0
RELEVEL_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftPoint:
    """How one policy served one window: policy in words, visits and load as in `Score`, experts copied just before
    it."""

    policy: str
    window: int
    workloads: tuple[str, ...]
    nodes_visited: float
    load_max_over_mean: float
    step_load_max_over_mean: float
    copies: int
    moved_bytes: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cut_windows(trace: RoutingTrace, num_windows: int, *, by_workload: bool = False) -> list[RoutingTrace]:
    """Whole requests in order of their first step (and id), in windows of about equal tokens; or workload after
    workload.

    Raises ConfigError for fewer than 2 windows, TraceError where there are too few requests, or no workloads to go by.
    """
    if num_windows < 2:
        raise ConfigError(f"drift needs 2 windows or more, got {num_windows}")
    if by_workload and trace.workload is None:
        raise TraceError("the trace names no workloads to go by")
    requests, first, owner, size = np.unique(trace.request, return_index=True, return_inverse=True, return_counts=True)
    if len(requests) < num_windows:
        raise TraceError(f"{len(requests)} requests make no {num_windows} windows of time; give fewer windows")
    begun = np.full(len(requests), np.iinfo(np.int64).max)
    np.minimum.at(begun, owner, trace.step)
    kind = trace.workload[first] if by_workload and trace.workload is not None else np.zeros(len(requests))
    order = np.lexsort((requests, begun, kind))
    before = np.cumsum(size[order]) - size[order] / 2
    window = np.empty(len(requests), np.int64)
    window[order] = np.minimum(num_windows - 1, before * num_windows // size.sum())
    parts = [np.flatnonzero(window[owner] == number) for number in range(num_windows)]
    if any(len(part) == 0 for part in parts):
        raise TraceError(f"some of {num_windows} windows would be empty, since one request fills several; give fewer")
    return [trace.select(part) for part in parts]


def drift(
    windows: list[RoutingTrace],
    topology: Topology,
    rows_per_rank: int,
    *,
    intervals: tuple[int, ...],
    expert_bytes: float,
    seed: int = 0,
    effort: float = 0.3,
) -> Iterator[list[DriftPoint]]:
    """Serve every window but the first under each policy; one policy's points at a time.

    intervals: a new plan every so many windows, from the windows since the last one (0: never again); and two policies
    on top: load alone re-levelled in every window from the plan of the first (5% of the slots at most), and EPLB anew.
    Raises ConfigError for a negative interval.
    """
    if any(interval < 0 for interval in intervals):
        raise ConfigError(f"plans are made every 1 window or more (0: never again), got {intervals}")
    shape = (topology.num_ranks, rows_per_rank)
    first = plan_placement(windows[0], topology, rows_per_rank=rows_per_rank, seed=seed, effort=effort)
    budget = int(RELEVEL_SHARE * first.physical_to_logical.size)

    def planned(recent: list[RoutingTrace], current: Placement) -> Placement:
        seen = concatenate(recent, source="windows")
        return plan_placement(seen, topology, rows_per_rank=rows_per_rank, current=current, seed=seed, effort=effort)

    def relevelled(recent: list[RoutingTrace], current: Placement) -> Placement:
        return relevel(current, _load(recent), most_copies=budget)

    def eplb(recent: list[RoutingTrace], current: Placement) -> Placement:
        return eplb_placement(_load(recent), *shape)

    policies = [(_said(interval), interval, planned, first) for interval in intervals]
    policies.append(("load re-levelled every window", 1, relevelled, first))
    policies.append(("EPLB every window", 1, eplb, eplb_placement(_load(windows[:1]), *shape)))
    for name, interval, change, current in policies:
        points = []
        for number in range(1, len(windows)):
            before = current
            if interval != NEVER and number > 1 and (number - 1) % interval == 0:
                current = change(windows[number - interval : number], current)
            points.append(_served(name, number, windows[number], topology, before, current, expert_bytes, seed))
        yield points


def _said(interval: int) -> str:
    return {NEVER: "one plan for ever", 1: "a plan every window"}.get(interval, f"a plan every {interval} windows")


def _load(windows: list[RoutingTrace]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = sum((count_load(window)[0] for window in windows), np.zeros(())).astype(np.float64)
    return total


def _served(
    policy: str,
    number: int,
    window: RoutingTrace,
    topology: Topology,
    before: Placement,
    now: Placement,
    expert_bytes: float,
    seed: int,
) -> DriftPoint:
    score = evaluate(now, topology, window, random_homes(window.request, topology.num_ranks, seed))
    copies = num_copies_between(before, now)
    named = [] if window.workload is None else np.unique(window.workload).tolist()
    return DriftPoint(
        policy=policy,
        window=number,
        workloads=tuple(window.workload_names[kind] for kind in named if kind < len(window.workload_names)),
        nodes_visited=score.nodes_visited,
        load_max_over_mean=score.load_max_over_mean,
        step_load_max_over_mean=score.step_load_max_over_mean,
        copies=copies,
        moved_bytes=copies * expert_bytes,
    )
