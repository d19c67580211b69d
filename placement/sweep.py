"""What if: one trace served by many clusters, slots, batches, links and planners, each point a modelled step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.baselines import eplb_placement, linear_placement
from placement.batches import NAMES, draw_steps, phase_tokens
from placement.comparing import Serving
from placement.core import Placement
from placement.costs import ModelSizes
from placement.errors import ConfigError
from placement.graph import count_load
from placement.homes import homes_per_token, random_homes, route_homes
from placement.plan import HOME_PREFIX, plan_placement
from placement.points import Point
from placement.pricing import part_times, step_cost, step_seconds
from placement.scaleout import ScaleOut, with_nic
from placement.stepcounts import StepCounts, count_steps
from placement.trace import DECODE, PREFILL, RoutingTrace

PLANNERS = ("moetis", "moetis-routed", "eplb", "linear")
MOST_COUNTED, POINT_TOKENS = 65_536, 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is varied. times: slots as multiples of the experts; batches: tokens of each GPU in a step; nics: GB/s
    between nodes (none: the topology's own); gpu_shares: the share of a rank's experts that its GPU has room for."""

    times: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0)
    planners: tuple[str, ...] = ("moetis", "eplb")
    decode_batches: tuple[int, ...] = (64,)
    prefill_batches: tuple[int, ...] = (1024,)
    nics: tuple[float, ...] = ()
    gpu_shares: tuple[float, ...] = (1.0,)
    effort: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for planner in self.planners:
            if planner not in PLANNERS:
                raise ConfigError(f"planner '{planner}' is none of {', '.join(PLANNERS)}")
        if not self.times or min(self.times) < 1 or not math.isfinite(max(self.times)):
            raise ConfigError(f"slots go from 1 x experts upwards, got {self.times}")
        if min(*self.decode_batches, *self.prefill_batches, 1) < 1:
            raise ConfigError("a batch needs 1 token a GPU or more")
        if not all(0 < share <= 1 for share in self.gpu_shares):
            raise ConfigError(f"the share of experts on the GPU lies above 0 and at most at 1, got {self.gpu_shares}")

    def num_plans(self) -> int:
        return len(self.times) * len(self.planners)


def rows_of(scale: ScaleOut, num_experts: int, times: Iterable[float]) -> list[int]:
    """Rows per rank for each multiple of the experts, ascending and without doubles; at most a row for each expert."""
    ranks = scale.group.num_ranks
    return sorted({min(num_experts, max(1, math.ceil(factor * num_experts / ranks - 1e-9))) for factor in times})


def sweep(
    trace: RoutingTrace, scale: ScaleOut, grid: Grid, sizes: ModelSizes, *, layer_factor: float = 1.0
) -> Iterator[list[Point]]:
    """Fit on one part of the requests, serve the other: the points of each number of slots and planner in turn.

    layer_factor: the model's layers over the trace's, where the trace holds a sample of them; times and bytes are
    scaled with it. Raises as `plan_placement`.
    """
    fit, judged = trace.split_by_request()
    load = count_load(fit)[0]
    plans: dict[int, Placement] = {}
    for rows in rows_of(scale, trace.num_experts, grid.times):
        for planner in grid.planners:
            placement = plans.get(rows) if planner.startswith("moetis") else None
            if placement is None:
                placement = _placement(planner, fit, load, scale, rows, grid)
            if planner.startswith("moetis"):
                plans[rows] = placement
            homes = _homes(planner, placement, scale, judged, grid.seed)
            yield list(_points(planner, placement, judged, homes, scale, grid, sizes, layer_factor))


def _placement(
    planner: str, fit: RoutingTrace, load: NDArray[Any], scale: ScaleOut, rows: int, grid: Grid
) -> Placement:
    ranks = scale.group.num_ranks
    if planner == "eplb":
        return eplb_placement(load, ranks, rows)
    if planner == "linear":
        return linear_placement(fit.num_layers, fit.num_experts, ranks, rows)
    return plan_placement(fit, scale.group, rows_per_rank=rows, seed=grid.seed, effort=grid.effort)


def _homes(planner: str, placement: Placement, scale: ScaleOut, judged: RoutingTrace, seed: int) -> NDArray[np.int32]:
    if planner != "moetis-routed":
        return random_homes(judged.request, scale.group.num_ranks, seed)
    requests, ranks = route_homes(placement, scale.group, judged, HOME_PREFIX)
    return homes_per_token(judged.request, requests, ranks)


def _points(
    planner: str,
    placement: Placement,
    judged: RoutingTrace,
    homes: NDArray[np.int32],
    scale: ScaleOut,
    grid: Grid,
    sizes: ModelSizes,
    layer_factor: float,
) -> Iterator[Point]:
    own = scale.group.links[scale.group.node_level].bandwidth / 1e9
    phases = [(DECODE, batch) for batch in grid.decode_batches] + [(PREFILL, batch) for batch in grid.prefill_batches]
    for phase, per_gpu in phases:
        tokens = phase_tokens(judged, phase)
        batch = per_gpu * scale.group.num_ranks
        counted = min(batch, MOST_COUNTED)
        steps = draw_steps(judged, tokens, counted, POINT_TOKENS, np.random.default_rng(grid.seed))
        for share in grid.gpu_shares:
            slots = Serving(sizes=sizes, gpu_share=share).gpu_slots(placement)
            counts = grown(count_steps(placement, scale.group, judged, homes, steps, gpu_slots=slots), batch / counted)
            for nic in grid.nics or (own,):
                yield _point(
                    NAMES[phase],
                    planner,
                    placement,
                    counts,
                    scale,
                    sizes,
                    layer_factor,
                    per_gpu,
                    nic,
                    share,
                    tokens.stand_in,
                )


def grown(counts: StepCounts, factor: float) -> StepCounts:
    """Counts of steps that are so many times larger, from a part of their tokens: pairs and vectors grow, and the
    distinct experts of a step that is cut at 65,536 tokens are taken as all that there are."""
    if factor == 1:
        return counts
    return replace(
        counts,
        tokens=np.round(counts.tokens * factor).astype(np.int64),
        pairs=np.round(counts.pairs * factor).astype(np.int32),
        vectors=np.round(counts.vectors * factor).astype(np.int64),
        busiest=np.round(counts.busiest * factor).astype(np.int64),
    )


def _point(
    phase: str,
    planner: str,
    placement: Placement,
    counts: StepCounts,
    scale: ScaleOut,
    sizes: ModelSizes,
    layer_factor: float,
    per_gpu: int,
    nic: float,
    share: float,
    stand_in: bool,
) -> Point:
    topology = with_nic(scale.group, nic)
    cost = step_cost(counts, topology, sizes)
    seconds = layer_factor * step_seconds(part_times(counts, topology, sizes))
    groups = scale.num_groups
    slowest = float(seconds.mean() if groups == 1 else np.percentile(seconds, 100 * (1 - 1 / groups)))
    layers = placement.num_layers * layer_factor
    node = topology.levels[topology.node_level]
    both_ways = sizes.token_bytes + sizes.home_bytes
    slots = Serving(sizes=sizes, gpu_share=share).gpu_slots(placement) or placement.rows_per_rank
    return Point(
        phase=phase,
        planner=planner,
        num_gpus=scale.num_gpus,
        group_gpus=placement.num_ranks,
        num_groups=scale.num_groups,
        rows_per_rank=placement.rows_per_rank,
        num_slots=placement.num_slots,
        times_experts=placement.num_slots / placement.num_experts,
        tokens_per_gpu=per_gpu,
        nic_gb_s=nic,
        gpu_share=share,
        expert_gb=slots * layers * sizes.expert_bytes / 1e9,
        nodes_visited=cost.bytes_per_token[node] / both_ways / placement.num_layers,
        node_kb_per_token=cost.bytes_per_token[node] * layer_factor / 1e3,
        step_imbalance=cost.step_imbalance,
        step_imbalance_p99=cost.step_imbalance_p99,
        hit_rate=cost.hit_rate,
        mean_s=float(seconds.mean()),
        p99_s=float(np.percentile(seconds, 99)),
        slowest_group_s=slowest,
        compute_s=cost.compute_s * layer_factor,
        miss_s=cost.miss_s * layer_factor,
        dispatch_s=cost.dispatch_s * layer_factor,
        combine_s=cost.combine_s * layer_factor,
        tokens_per_s=float(counts.tokens.mean() * scale.num_groups / seconds.mean()),
        stand_in=stand_in,
    )
