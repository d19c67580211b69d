"""How many spare slots for how much less traffic: the curve, and the fewest slots that reach a goal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from placement.errors import ConfigError
from placement.evaluate import evaluate
from placement.homes import homes_of
from placement.plan import plan_placement
from placement.topology import Topology
from placement.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Held-out nodes visited and load max/mean at a number of slots; saved: the share of the first point's visits."""

    rows_per_rank: int
    num_slots: int
    nodes_visited: float
    load_max_over_mean: float
    saved: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_between(topology: Topology, num_experts: int, first: float, last: float, most_points: int) -> list[int]:
    """Rows per rank from first to last times as many slots as experts, evenly spread, at most most_points of them.

    Both ends are rounded up to whole rows. Raises ConfigError where they make no range, or leave an expert no slot.
    """
    if not 1 <= first <= last < math.inf:
        raise ConfigError(f"slots go from 1 x experts upwards; got from {first:g} to {last:g}")
    if most_points < 2:
        raise ConfigError(f"the slots curve needs 2 points or more, got {most_points}")
    least, most = (math.ceil(factor * num_experts / topology.num_ranks - 1e-9) for factor in (first, last))
    if most > num_experts:
        raise ConfigError(
            f"{last:g} x {num_experts} experts on {topology.num_ranks} ranks are {most} slots per rank, "
            f"but no expert may lie twice on a rank; give at most {topology.num_ranks}"
        )
    points = np.linspace(least, most, min(most_points, most - least + 1))
    return sorted({round(point) for point in points.tolist()})


def slots_curve(
    trace: RoutingTrace, topology: Topology, rows: list[int], *, seed: int = 0, effort: float = 0.3
) -> Iterator[CurvePoint]:
    """Fit a plan for each number of rows per rank on one part of the requests, judge it on the other.

    rows ascending; savings are counted from the first. One point at a time, since each takes a plan. Raises ConfigError
    for no rows, else as `plan_placement`, when the first point is asked for.
    """
    if not rows:
        raise ConfigError("the slots curve needs at least one number of rows per rank")
    fit, held_out = trace.split_by_request()
    homes = homes_of(held_out, topology.num_ranks, seed)
    first: float | None = None
    for rows_per_rank in rows:
        placement = plan_placement(fit, topology, rows_per_rank=rows_per_rank, seed=seed, effort=effort)
        score = evaluate(placement, topology, held_out, homes)
        first = score.nodes_visited if first is None else first
        yield CurvePoint(
            rows_per_rank=rows_per_rank,
            num_slots=rows_per_rank * topology.num_ranks,
            nodes_visited=score.nodes_visited,
            load_max_over_mean=score.load_max_over_mean,
            saved=1 - score.nodes_visited / first if first > 0 else 0.0,
        )


def fewest_rows(curve: list[CurvePoint], saving: float) -> int | None:
    """The fewest rows per rank on the curve that save at least this share of the visits; None where none does."""
    return next((point.rows_per_rank for point in curve if point.saved >= saving), None)
