"""Seconds from counts: the cost model of `costs.py`, with its parts apart and with what the cache misses cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.costs import ModelSizes
from placement.stepcounts import StepCounts
from placement.topology import Topology

COMPUTE, MISSES, DISPATCH, COMBINE = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step's MoE layers on average: seconds by part, their sum, and what lies behind them.

    miss_s: what fetching experts over the host link adds to the slowest ranks. Where batches overlap, mean_s is less
    than the sum of the parts. bytes_per_token: by level, over all layers, there and back; busiest_bytes: by level, of
    the busiest group in a step. step_imbalance: load max/mean over ranks of a step, averaged over layers, mean and p99.
    """

    mean_s: float
    p99_s: float
    compute_s: float
    miss_s: float
    dispatch_s: float
    combine_s: float
    tokens_per_step: float
    num_steps: int
    hit_rate: float
    step_imbalance: float
    step_imbalance_p99: float
    bytes_per_token: dict[str, float]
    busiest_bytes: dict[str, float]

    @property
    def exchange_share(self) -> float:
        """The share of the parts that goes into dispatch and combine."""
        exchange = self.dispatch_s + self.combine_s
        total = self.compute_s + self.miss_s + exchange
        return exchange / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def part_times(counts: StepCounts, topology: Topology, sizes: ModelSizes) -> NDArray[np.float64]:
    """Seconds [S, L, 4] of compute, misses, dispatch and combine.

    The slowest rank sets the pace: misses are what it takes longer because of them. At each level the busiest group's
    link carries its vectors, after the level's latency.
    """
    device = topology.device
    own = counts.read * (sizes.expert_bytes / device.hbm_bandwidth) + counts.pairs * (
        sizes.pair_flops / device.peak_flops
    )
    compute = own.max(axis=2)
    slowed = (own + counts.missed * (sizes.expert_bytes / device.host_link_bandwidth)).max(axis=2)
    bandwidth = np.array([link.bandwidth for link in topology.links])
    latency = np.where(counts.busiest > 0, np.array([link.latency_s for link in topology.links]), 0.0)
    there, home = (
        (latency + counts.busiest * (size / bandwidth)).sum(axis=2) for size in (sizes.token_bytes, sizes.home_bytes)
    )
    return np.stack([compute, slowed - compute, there, home], axis=2)


def step_seconds(parts: NDArray[np.float64], *, overlap: bool = False) -> NDArray[np.float64]:
    """Seconds [S] from part times [S, L, 4]: their sum, or the larger of computing and exchanging in every layer."""
    computing = parts[:, :, COMPUTE] + parts[:, :, MISSES]
    exchanging = parts[:, :, DISPATCH] + parts[:, :, COMBINE]
    per_layer = np.maximum(computing, exchanging) if overlap else computing + exchanging
    seconds: NDArray[np.float64] = per_layer.sum(axis=1)
    return seconds


def step_cost(counts: StepCounts, topology: Topology, sizes: ModelSizes, *, overlap: bool = False) -> StepCost:
    """Average the priced steps."""
    parts = part_times(counts, topology, sizes)
    seconds = step_seconds(parts, overlap=overlap)
    mean = parts.sum(axis=1).mean(axis=0)
    imbalance = counts.step_imbalance()
    both_ways = sizes.token_bytes + sizes.home_bytes
    busiest = counts.busiest.sum(axis=1).mean(axis=0) * both_ways
    return StepCost(
        mean_s=float(seconds.mean()),
        p99_s=float(np.percentile(seconds, 99)),
        compute_s=float(mean[COMPUTE]),
        miss_s=float(mean[MISSES]),
        dispatch_s=float(mean[DISPATCH]),
        combine_s=float(mean[COMBINE]),
        tokens_per_step=float(counts.tokens.mean()),
        num_steps=len(seconds),
        hit_rate=counts.hit_rate,
        step_imbalance=float(imbalance.mean()),
        step_imbalance_p99=float(np.percentile(imbalance, 99)),
        bytes_per_token=_by_level(topology, counts.vectors_per_token() * both_ways),
        busiest_bytes=_by_level(topology, busiest),
    )


def _by_level(topology: Topology, values: NDArray[np.float64]) -> dict[str, float]:
    return {level: float(value) for level, value in zip(topology.levels, values, strict=True)}
