"""The points of a sweep, and which of them no other beats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One modelled case. Times are of the MoE layers of one step; tokens_per_s of all groups together, by those alone.

    slowest_group_s: the step of the slowest of all groups, as far as the drawn steps show it. expert_gb: weights of a
    GPU's share of the experts. step_imbalance: load max/mean over ranks. pareto: no other point of the same phase,
    batch, links and GPU share has as few slots, as little traffic between nodes and as level a load.
    """

    phase: str
    planner: str
    num_gpus: int
    group_gpus: int
    num_groups: int
    rows_per_rank: int
    num_slots: int
    times_experts: float
    tokens_per_gpu: int
    nic_gb_s: float
    gpu_share: float
    expert_gb: float
    nodes_visited: float
    node_kb_per_token: float
    step_imbalance: float
    step_imbalance_p99: float
    hit_rate: float
    mean_s: float
    p99_s: float
    slowest_group_s: float
    compute_s: float
    miss_s: float
    dispatch_s: float
    combine_s: float
    tokens_per_s: float
    stand_in: bool
    pareto: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def mark_pareto(points: list[Point]) -> list[Point]:
    """The same points, those that no other of their phase, batch, links, GPUs and GPU share beats marked."""

    def case(point: Point) -> tuple[Any, ...]:
        return point.phase, point.tokens_per_gpu, point.nic_gb_s, point.gpu_share, point.num_gpus, point.group_gpus

    def figures(point: Point) -> tuple[float, float, float]:
        return point.num_slots, point.node_kb_per_token, point.step_imbalance

    def beaten(point: Point) -> bool:
        mine = figures(point)
        others = (figures(other) for other in points if case(other) == case(point))
        return any(theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True)) for theirs in others)

    return [replace(point, pareto=not beaten(point)) for point in points]
