"""How many spare slots for how much less traffic: the curve, and the fewest slots that reach a goal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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


def slots_curve(
    trace: RoutingTrace, topology: Topology, rows: list[int], *, seed: int = 0, effort: float = 0.3
) -> list[CurvePoint]:
    """Fit a plan for each number of rows per rank on one part of the requests, judge it on the other.

    rows ascending; savings are counted from the first. Raises ConfigError for no rows, else as `plan_placement`.
    """
    if not rows:
        raise ConfigError("the slots curve needs at least one number of rows per rank")
    fit, held_out = trace.split_by_request()
    homes = homes_of(held_out, topology.num_ranks, seed)
    points: list[CurvePoint] = []
    for rows_per_rank in rows:
        placement = plan_placement(fit, topology, rows_per_rank=rows_per_rank, seed=seed, effort=effort)
        score = evaluate(placement, topology, held_out, homes)
        first = points[0].nodes_visited if points else score.nodes_visited
        points.append(
            CurvePoint(
                rows_per_rank=rows_per_rank,
                num_slots=rows_per_rank * topology.num_ranks,
                nodes_visited=score.nodes_visited,
                load_max_over_mean=score.load_max_over_mean,
                saved=1 - score.nodes_visited / first if first > 0 else 0.0,
            )
        )
    return points


def fewest_rows(curve: list[CurvePoint], saving: float) -> int | None:
    """The fewest rows per rank on the curve that save at least this share of the visits; None where none does."""
    return next((point.rows_per_rank for point in curve if point.saved >= saving), None)
