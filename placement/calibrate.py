"""Calibrate the cost model: the numbers of device and links that explain measured steps best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from placement.costs import ModelSizes
from placement.errors import ConfigError
from placement.pricing import part_times, step_seconds
from placement.stepcounts import StepCounts
from placement.topology import Device, Link, Topology

ROUNDS = 12
FREE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Seconds of one expert read, one pair computed, one expert fetched, one vector over the busiest link there and
    back, and of one way of one layer at one level, whatever it carries."""

    read_s: float
    pair_s: float
    miss_s: float
    vector_s: float
    way_s: float

    def topology(self, like: Topology, sizes: ModelSizes) -> Topology:
        """The same tree with a device and links of these numbers, so that `pricing` gives these seconds."""
        device = Device(
            hbm_bandwidth=sizes.expert_bytes / max(FREE, self.read_s),
            peak_flops=sizes.pair_flops / max(FREE, self.pair_s),
            host_link_bandwidth=sizes.expert_bytes / max(FREE, self.miss_s),
        )
        both_ways = sizes.token_bytes + sizes.home_bytes
        link = Link(bandwidth=both_ways / max(FREE, self.vector_s), latency_s=self.way_s)
        return replace(like, device=device, links=(link,) * len(like.links))


def fit_costs(counts: Sequence[StepCounts], seconds: NDArray[np.float64]) -> Fitted:
    """Fit to measured steps: seconds [sum of S] of the MoE layers of the counted steps, in order.

    Least absolute relative deviations (by reweighting), since the noise of a shared machine has a heavy tail; nothing
    may be negative. Which rank is the slowest of a layer depends on the numbers sought, so that it is found again each
    round.
    Raises ConfigError for fewer steps than numbers, or a step that took no time.
    """
    if len(seconds) < 10 or not (seconds > 0).all():
        raise ConfigError(f"a calibration needs 10 steps or more, each longer than 0 s; got {len(seconds)}")
    unit = np.array([1.0, 1.0, 1.0, 1.0, 1.0])
    weight = np.ones(len(seconds))
    for _ in range(ROUNDS):
        features = np.concatenate([_features(one, unit) for one in counts]) / seconds[:, None]
        scale = np.maximum(features.max(axis=0), FREE)
        found, _ = nnls(features / scale * weight[:, None], weight)
        unit = found / scale
        weight = 1 / np.sqrt(np.maximum(0.01, np.abs(features @ unit - 1)))
    read, pair, miss, vector, way = (float(value) for value in unit)
    return Fitted(read_s=read, pair_s=pair, miss_s=miss, vector_s=vector, way_s=way)


def _features(counts: StepCounts, unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """[S, 5]: reads, pairs and misses of the slowest rank of each layer under these costs, vectors, and ways."""
    own = counts.read * unit[0] + counts.pairs * unit[1] + counts.missed * unit[2]
    slowest = own.argmax(axis=2)[:, :, None]
    of_slowest = [np.take_along_axis(part, slowest, axis=2).sum(axis=(1, 2)) for part in _parts(counts)]
    ways = 2 * (counts.busiest > 0).sum(axis=(1, 2))
    return np.stack([*of_slowest, counts.busiest.sum(axis=(1, 2)), ways], axis=1).astype(np.float64)


def _parts(counts: StepCounts) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    return counts.read, counts.pairs, counts.missed


def predict(fitted: Fitted, counts: StepCounts, topology: Topology, sizes: ModelSizes) -> NDArray[np.float64]:
    """Seconds [S] that the cost model, so calibrated, gives the MoE layers of counted steps."""
    return step_seconds(part_times(counts, fitted.topology(topology, sizes), sizes))
