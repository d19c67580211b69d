"""Drift: how far present traffic is from the traffic that a plan was made for, and how much of that is chance.

Distance is Jensen-Shannon's (square root of the divergence, base 2: 0 alike, 1 nothing in common), per layer, of the
load over experts and of co-activation over pairs of experts. Two samples of the very same traffic differ too: the floor
is what differences come out when the requests of both are dealt out again at random (a permutation test; requests, not
tokens, are the independent draws).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.errors import TraceError
from placement.trace import RoutingTrace

RESAMPLES = 200
MOST_REQUESTS = 512
MOST_TOKENS = 20_000
MOST_PAIRS = 512
MOST_LAYERS = 8
FLOOR_PERCENTILE = 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """distance: mean over layers. chance: the mean of the same over random deals; floor: their 99th percentile."""

    distance: float
    chance: float
    floor: float

    @property
    def drifted(self) -> bool:
        """Further apart than chance explains."""
        return self.distance > self.floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """load, affinity: see `Divergence`. The requests behind each side."""

    load: Divergence
    affinity: Divergence
    planned_requests: int
    present_requests: int

    @property
    def drifted(self) -> bool:
        return self.load.drifted or self.affinity.drifted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"drifted": self.drifted}

    def says(self) -> str:
        """One sentence."""
        parts = [
            f"{name} {one.distance:.3f} apart (chance {one.chance:.3f}, at most {one.floor:.3f})"
            for name, one in (("load", self.load), ("affinity", self.affinity))
        ]
        found = "traffic has drifted" if self.drifted else "no drift beyond chance"
        return f"{found}: {', '.join(parts)}; {self.present_requests} requests against {self.planned_requests}"


def measure_drift(planned: RoutingTrace, present: RoutingTrace, *, seed: int = 0) -> Drift:
    """Compare the traffic that a plan was made for with present traffic.

    Of each side 512 requests and 20,000 tokens at most are looked at; affinity on 8 layers at most, and the 512 most
    frequent pairs of each.

    Raises TraceError where the two are of different models, or a side has less than two requests.
    """
    for name in ("num_layers", "num_experts"):
        if getattr(planned, name) != getattr(present, name):
            raise TraceError(
                f"drift: the plan was made for a model with {name} {getattr(planned, name)}, "
                f"present traffic has {getattr(present, name)}"
            )
    sides = [_owners(planned, seed), _owners(present, seed + 1)]
    sizes = [int(owner.max(initial=-1)) + 1 for _, owner in sides]
    if min(sizes) < 2:
        raise TraceError(f"drift: two requests at least are needed on each side, got {sizes[0]} and {sizes[1]}")
    experts = np.concatenate([kept for kept, _ in sides])
    owner = np.concatenate([sides[0][1], sides[1][1] + sizes[0]])
    deals = _deals(sizes, seed)
    return Drift(
        load=_divergence(_load_features(experts, owner, planned.num_experts), deals),
        affinity=_divergence(_pair_features(experts, owner, planned.num_experts), deals),
        planned_requests=sizes[0],
        present_requests=sizes[1],
    )


def _owners(trace: RoutingTrace, seed: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """experts [t, L, K] of a bounded number of requests, and the request of each token, numbered from 0."""
    rng = np.random.default_rng(seed)
    requests = np.unique(trace.request)
    if len(requests) > MOST_REQUESTS:
        requests = np.sort(rng.choice(requests, MOST_REQUESTS, replace=False))
    kept = np.flatnonzero(np.isin(trace.request, requests))
    if len(kept) > MOST_TOKENS:
        kept = np.sort(rng.choice(kept, MOST_TOKENS, replace=False))
    return trace.experts[kept], np.searchsorted(requests, trace.request[kept])


def _deals(sizes: list[int], seed: int) -> NDArray[np.float32]:
    """[1 + resamples, requests]: 1 for the planned side. The first is the true one."""
    rng = np.random.default_rng(seed)
    true = np.repeat([1.0, 0.0], sizes)
    return np.stack([true, *(rng.permutation(true) for _ in range(RESAMPLES))]).astype(np.float32)


def _load_features(experts: NDArray[Any], owner: NDArray[np.int64], num_experts: int) -> list[NDArray[np.float32]]:
    """For each layer [requests, E]: how often each request chose each expert."""
    top_k = experts.shape[2]
    rows = np.repeat(owner, top_k)
    shape = (int(owner.max()) + 1, num_experts)
    return [_table(rows, experts[:, layer].reshape(-1), shape) for layer in range(experts.shape[1])]


def _pair_features(experts: NDArray[Any], owner: NDArray[np.int64], num_experts: int) -> list[NDArray[np.float32]]:
    """For some layers [requests, pairs + 1]: how often each request chose both of a pair; last, all other pairs."""
    num_layers, top_k = experts.shape[1:]
    one, two = np.triu_indices(top_k, 1)
    if not len(one):
        return []
    rows = np.repeat(owner, len(one))
    features = []
    for layer in np.unique(np.linspace(0, num_layers - 1, MOST_LAYERS).astype(int)):
        chosen = np.sort(experts[:, layer].astype(np.int64), axis=1)
        pairs = (chosen[:, one] * num_experts + chosen[:, two]).reshape(-1)
        count = np.bincount(pairs, minlength=num_experts**2)
        kept = np.argsort(-count, kind="stable")[:MOST_PAIRS]
        place = np.full(len(count), len(kept))
        place[kept] = np.arange(len(kept))
        features.append(_table(rows, place[pairs], (int(owner.max()) + 1, len(kept) + 1)))
    return features


def _table(rows: NDArray[np.int64], columns: NDArray[Any], shape: tuple[int, int]) -> NDArray[np.float32]:
    flat = np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return flat.reshape(shape).astype(np.float32)


def _divergence(features: list[NDArray[np.float32]], deals: NDArray[np.float32]) -> Divergence:
    """The mean distance over layers of the true deal, against that of the random ones."""
    if not features:
        return Divergence(distance=0.0, chance=0.0, floor=0.0)
    distances = np.mean([_distances(deals @ table, table.sum(axis=0)) for table in features], axis=0)
    return Divergence(
        distance=float(distances[0]),
        chance=float(distances[1:].mean()),
        floor=float(np.percentile(distances[1:], FLOOR_PERCENTILE)),
    )


def _distances(planned: NDArray[np.float32], total: NDArray[np.float32]) -> NDArray[np.float64]:
    """Jensen-Shannon distance [deals] between planned [deals, n] and what is left of total [n]."""
    one = _shares(planned.astype(np.float64))
    other = _shares(total.astype(np.float64) - planned)
    middle: NDArray[np.float64] = (one + other) / 2
    divergence = (_relative(one, middle) + _relative(other, middle)) / 2
    distance: NDArray[np.float64] = np.sqrt(np.clip(divergence, 0, 1))
    return distance


def _shares(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _relative(one: NDArray[np.float64], middle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Kullback-Leibler's divergence in bits, over the last axis; middle is 0 only where one is."""
    ratio = np.divide(one, middle, out=np.ones_like(one), where=one > 0)
    bits: NDArray[np.float64] = (one * np.log2(ratio)).sum(axis=1)
    return bits
