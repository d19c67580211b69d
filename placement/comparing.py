"""Placements side by side on the same held-out traffic: visits, load, bytes and modelled steps, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.batches import NAMES, draw_steps, group_requests, phase_tokens
from placement.core import Placement
from placement.costs import ModelSizes
from placement.errors import ConfigError
from placement.evaluate import Replay, Score, max_over_mean, replay, score_of
from placement.intervals import Interval, jackknife, random_groups
from placement.pricing import StepCost, step_cost
from placement.stepcounts import ALL_RESIDENT, Steps, count_steps
from placement.topology import Topology
from placement.trace import DECODE, PREFILL, RoutingTrace

MOST_SCORE_GROUPS, STEP_GROUPS = 40, 8
MOST_STEP_TOKENS = 16_384
STEP_FIGURES = ("mean_s", "compute_s", "miss_s", "dispatch_s", "combine_s", "hit_rate", "step_imbalance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How the cluster is taken to serve: tokens of all ranks together in a decode and in a prefill step.

    gpu_share: the share of a rank's slots that its GPU has room for, the others waiting in host memory behind a cache.
    overlap: whether computing hides behind exchanging. Raises ConfigError where a value makes no sense.
    """

    sizes: ModelSizes
    decode_batch: int = 512
    prefill_batch: int = 8192
    gpu_share: float = 1.0
    overlap: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.decode_batch, self.prefill_batch) < 1 or not 0 < self.gpu_share <= 1:
            raise ConfigError(
                f"batches must be 1 token or more and the share of experts on the GPU above 0 and at most 1, got "
                f"{self.decode_batch}, {self.prefill_batch} and {self.gpu_share:g}"
            )

    def batch(self, phase: int) -> int:
        return self.decode_batch if phase == DECODE else self.prefill_batch

    def gpu_slots(self, placement: Placement) -> int:
        """Slots of one layer on a GPU; 0 where all of a rank's experts fit, as the workers count them."""
        if self.gpu_share == 1:
            return ALL_RESIDENT
        return max(1, math.ceil(self.gpu_share * placement.rows_per_rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """The modelled steps of one phase. by_group: the same from each group of requests alone, for intervals.

    stand_in: the trace tells no tokens of this phase, so all tokens stand for it.
    """

    cost: StepCost
    by_group: tuple[StepCost, ...]
    stand_in: bool

    def interval(self, figure: str) -> Interval | None:
        return random_groups(getattr(self.cost, figure), np.array([getattr(group, figure) for group in self.by_group]))

    def bytes_interval(self, level: str) -> Interval | None:
        return random_groups(
            self.cost.bytes_per_token[level], np.array([group.bytes_per_token[level] for group in self.by_group])
        )

    def ratio_to(self, other: PhaseCost) -> dict[str, Any]:
        """This step time over another's on the same steps, with its interval."""
        value = self.cost.mean_s / other.cost.mean_s
        pairs = zip(self.by_group, other.by_group, strict=True)
        return {
            "ratio": value,
            "interval": random_groups(value, np.array([mine.mean_s / theirs.mean_s for mine, theirs in pairs])),
        }

    def to_dict(self) -> dict[str, Any]:
        intervals: dict[str, Any] = {figure: self.interval(figure) for figure in STEP_FIGURES}
        intervals["bytes_per_token"] = {level: self.bytes_interval(level) for level in self.cost.bytes_per_token}
        return self.cost.to_dict() | {"intervals": intervals, "stand_in": self.stand_in}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What a placement does to traffic. visits [G, 2]: nodes and ranks visited, by group of requests."""

    score: Score
    intervals: dict[str, Interval | None]
    visits: NDArray[np.int64]
    phases: dict[str, PhaseCost]
    num_slots: int

    def to_dict(self) -> dict[str, Any]:
        phases = {name: phase.to_dict() for name, phase in self.phases.items()}
        return self.score.to_dict() | {"slots": self.num_slots, "intervals": self.intervals} | phases

    def over(self, other: Assessment) -> dict[str, Any]:
        """Figures of this placement over another's on the same traffic; None where the other's is 0."""
        figures = ("nodes_visited", "ranks_visited", "load_max_over_mean")
        plain = {name: _ratio(getattr(self.score, name), getattr(other.score, name)) for name in figures}
        paired = np.stack([self.visits[:, 0], other.visits[:, 0]], axis=1)
        visits = None if not other.visits[:, 0].sum() else jackknife(paired, lambda parts: float(parts[0] / parts[1]))
        steps = {f"{name}_step": phase.ratio_to(other.phases[name]) for name, phase in self.phases.items()}
        return plain | {"nodes_visited_interval": visits} | steps


def _ratio(mine: float, other: float) -> float | None:
    return mine / other if other else None


def assess(
    placement: Placement, topology: Topology, trace: RoutingTrace, homes: NDArray[np.int32], serving: Serving
) -> Assessment:
    """Replay a trace and price its steps, prefill and decode apart. homes [T]. Raises as `evaluate`.

    The same trace, homes and seed give every placement the same steps, so that ratios are of pairs.
    """
    score = score_of(replay(placement, topology, trace, homes), topology, trace)
    group = group_requests(trace.request, MOST_SCORE_GROUPS, serving.seed)
    grouped = replay(placement, topology, trace, homes, group)
    phases = {
        NAMES[phase]: _phase_cost(placement, topology, trace, homes, serving, phase) for phase in (DECODE, PREFILL)
    }
    visits = _visits_by_group(grouped, group)
    return Assessment(
        score=score,
        intervals=_intervals(grouped, visits, np.bincount(group) * trace.num_layers),
        visits=visits,
        phases=phases,
        num_slots=placement.num_slots,
    )


def _visits_by_group(counts: Replay, group: NDArray[np.int32]) -> NDArray[np.int64]:
    sums = [np.bincount(group, weights=visits) for visits in (counts.nodes, counts.ranks)]
    return np.stack(sums, axis=1).astype(np.int64)


def _intervals(grouped: Replay, visits: NDArray[np.int64], tokens: NDArray[np.int64]) -> dict[str, Interval | None]:
    """tokens [G]: (token, layer) pairs of each group."""
    per_pair = [
        jackknife(np.stack([visits[:, which], tokens], axis=1), lambda parts: float(parts[0] / max(1, parts[1])))
        for which in (0, 1)
    ]
    return {
        "nodes_visited": per_pair[0],
        "ranks_visited": per_pair[1],
        "load_max_over_mean": jackknife(grouped.load, max_over_mean),
    }


def _phase_cost(
    placement: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    serving: Serving,
    phase: int,
) -> PhaseCost:
    tokens = phase_tokens(trace, phase)
    batch, gpu_slots = serving.batch(phase), serving.gpu_slots(placement)

    def cost(steps: Steps) -> StepCost:
        counts = count_steps(placement, topology, trace, homes, steps, gpu_slots=gpu_slots)
        return step_cost(counts, topology, serving.sizes, overlap=serving.overlap)

    rng = np.random.default_rng(serving.seed)
    whole = cost(draw_steps(trace, tokens, batch, MOST_STEP_TOKENS, rng))
    group = group_requests(trace.request[tokens.index], STEP_GROUPS, serving.seed)
    parts = [tokens.only(np.flatnonzero(group == number)) for number in range(int(group.max()) + 1)]
    by_group = [cost(draw_steps(trace, part, batch, MOST_STEP_TOKENS // len(parts), rng)) for part in parts]
    return PhaseCost(cost=whole, by_group=tuple(by_group), stand_in=tokens.stand_in)
