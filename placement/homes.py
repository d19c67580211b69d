"""Homes: the rank on which a request's attention runs.

A home near the experts that a request uses saves hops in every layer at once. Homes are random, recorded in the trace,
or routed: chosen from the experts of the request's first tokens alone, under a load limit.
"""

from __future__ import annotations

import math
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.cover import masks_of, serve_units
from placement.dispatch import mix
from placement.errors import TraceError
from placement.evaluate import check_fit
from placement.topology import Topology
from placement.trace import RoutingTrace

DEFAULT_SLACK = 1.0
PRICE_ROUNDS = 300
MOST_EXACT_UNITS = 16
MOST_FEATURES = 4096


@nb.njit(cache=True, nogil=True)
def _hash_all(values: Any, seed: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = mix(mix(np.uint64(values[i])) ^ np.uint64(seed))


def random_homes(request: NDArray[np.int64], num_ranks: int, seed: int = 0) -> NDArray[np.int32]:
    """One rank per request, by a hash of its id: request [T] -> int32 [T]."""
    words = np.empty(len(request), np.uint64)
    _hash_all(np.asarray(request, np.int64), seed, words)
    return (words % np.uint64(num_ranks)).astype(np.int32)


def homes_of(trace: RoutingTrace, num_ranks: int, seed: int = 0) -> NDArray[np.int32]:
    """The recorded source ranks [T], or random homes where the trace does not know them all.

    Raises TraceError where a recorded rank is not one of num_ranks.
    """
    if trace.source_rank.min() < 0:
        return random_homes(trace.request, num_ranks, seed)
    if trace.source_rank.max() >= num_ranks:
        raise TraceError(
            f"'source_rank' names rank {trace.source_rank.max()}, but there are {num_ranks} ranks; "
            f"the trace was recorded on a larger cluster"
        )
    return trace.source_rank


def first_tokens(trace: RoutingTrace, prefix: int) -> NDArray[np.intp]:
    """The index of the tokens [n] that are among the first `prefix` of their request, in position order."""
    order = np.lexsort((trace.position, trace.request))
    request = trace.request[order]
    start = np.flatnonzero(np.r_[True, request[1:] != request[:-1]])
    place = np.arange(len(order)) - np.repeat(start, np.diff(np.r_[start, len(order)]))
    return np.sort(order[place < prefix])


@nb.njit(cache=True, nogil=True)
def _count_saved(chosen: Any, owner: Any, masks: Any, num_units: Any, saved: Any) -> None:
    """saved [Q, U]: other units that a token needs not visit with its home at u, against a home that has nothing."""
    served = np.empty(chosen.shape[1], np.int8)
    for token in range(len(chosen)):
        without = serve_units(chosen[token], -1, masks, served)
        useful = np.uint64(0)
        for expert in chosen[token]:
            useful |= masks[expert]
        for unit in range(num_units):
            if (useful >> np.uint64(unit)) & np.uint64(1):
                saved[owner[token], unit] += without - serve_units(chosen[token], unit, masks, served)


@nb.njit(cache=True, nogil=True)
def _count_touched(chosen: Any, owner: Any, holds: Any, touched: Any) -> None:
    """touched [Q, U]: chosen experts that lie on unit u. holds [U, E]."""
    for token in range(len(chosen)):
        for expert in chosen[token]:
            for unit in range(holds.shape[0]):
                touched[owner[token], unit] += holds[unit, expert]


def home_value(
    placement: Placement,
    unit_of_rank: NDArray[np.int32],
    trace: RoutingTrace,
    owner: NDArray[np.int64],
    num_owners: int,
) -> NDArray[np.float64]:
    """What a home at each unit saves each owner, per token and layer: float64 [owners, U], in other units visited.

    owner [T] names whose token it is (a request, a workload). unit_of_rank [R]: nodes, or ranks. Beyond 16 units the
    number of chosen experts that lie on the unit stands in for the saving: as good a guide there, and far cheaper.
    """
    num_units = int(unit_of_rank.max()) + 1
    counts = np.zeros((num_owners, num_units), np.int64)
    copies = placement.copies_per_rank()
    for layer in range(placement.num_layers):
        chosen = np.ascontiguousarray(trace.experts[:, layer], np.int16)
        holds = np.zeros((num_units, placement.num_experts), np.uint8)
        np.maximum.at(holds, unit_of_rank, copies[layer])
        if num_units <= MOST_EXACT_UNITS:
            slots = np.where(holds > 0, np.arange(placement.num_experts, dtype=np.int32), np.int32(-1))
            _count_saved(chosen, owner, masks_of(slots, placement.num_experts)[0], num_units, counts)
        else:
            _count_touched(chosen, owner, holds, counts)
    tokens = np.maximum(1, np.bincount(owner, minlength=num_owners))
    value: NDArray[np.float64] = counts / tokens[:, None] / placement.num_layers
    return value


def price_units(
    value: NDArray[np.float64], weight: NDArray[np.float64], limit: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Prices [U] at which every owner's dearest wish (value - price) fills no unit beyond its limit, nearly.

    value [Q, U], weight [Q] the load that an owner brings, limit [U] in the same unit. An auction: units that are asked
    for too much get dearer, step by smaller step.
    """
    prices = np.zeros(value.shape[1])
    scale = float(np.ptp(value, axis=1).mean()) if value.size else 0.0
    for turn in range(PRICE_ROUNDS):
        wish = np.argmax(value - prices, axis=1)
        asked = np.bincount(wish, weights=weight, minlength=len(prices))
        step = scale * (1 - turn / PRICE_ROUNDS) ** 2
        prices = np.maximum(0.0, prices + step * (asked / limit - 1))
    return prices


def assign_under_limit(
    value: NDArray[np.float64], weight: NDArray[np.float64], limit: NDArray[np.float64]
) -> NDArray[np.int64]:
    """A unit for each owner [Q] with the most value, within the limits (first those who lose most by a second choice).

    value [Q, U]; weight [Q] load of each; limit [U]. Where one owner alone is above every limit, the emptiest takes it.
    """
    net = value - price_units(value, weight, limit)
    best_two = -np.partition(-net, min(1, net.shape[1] - 1), axis=1)
    regret = best_two[:, 0] - best_two[:, min(1, net.shape[1] - 1)]
    room = limit.astype(np.float64).copy()
    chosen = np.zeros(len(value), np.int64)
    for owner in np.argsort(-regret * weight, kind="stable"):
        fits = room >= weight[owner] - 1e-9
        unit = int(np.argmax(np.where(fits, net[owner], -np.inf))) if fits.any() else int(np.argmax(room))
        chosen[owner] = unit
        room[unit] -= weight[owner]
    return chosen


def share_limits(total: float, share: NDArray[np.float64], slack: float, largest: float) -> NDArray[np.float64]:
    """Limits [U] that together hold total with slack to spare: share [U] sums to 1; largest is the largest owner."""
    limits: NDArray[np.float64] = np.ceil(total * share * slack / largest) * largest
    return limits


def route_homes(
    placement: Placement,
    topology: Topology,
    trace: RoutingTrace,
    prefix: int,
    *,
    slack: float = DEFAULT_SLACK,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The home of each request from the experts of its first `prefix` tokens: (requests [Q] ascending, ranks [Q]).

    A node (and a rank in it) gets at most slack times its share of the requests, rounded up; more room gains hops
    little and costs balance.
    Raises TraceError where prefix is below 1, and as `check_fit`.
    """
    if prefix < 1:
        raise TraceError(
            f"a home is chosen from the first tokens of a request: prefix must be at least 1, got {prefix}"
        )
    check_fit(placement, topology, trace)
    start = trace.select(first_tokens(trace, prefix))
    requests, owner = np.unique(start.request, return_inverse=True)
    ranks = np.zeros(len(requests), np.int32)
    node_of_rank = topology.node_of_rank()
    share = np.bincount(node_of_rank) / topology.num_ranks
    node_value = home_value(placement, node_of_rank, start, owner, len(requests))
    ones = np.ones(len(requests))
    nodes = assign_under_limit(node_value, ones, share_limits(len(requests), share, slack, 1.0))
    all_ranks = np.arange(topology.num_ranks, dtype=np.int32)
    rank_value = home_value(placement, all_ranks, start, owner, len(requests))
    for node in range(topology.num_nodes):
        inside = np.flatnonzero(node_of_rank == node)
        here = np.flatnonzero(nodes == node)
        limit = max(1, math.ceil(len(here) / len(inside))) * np.ones(len(inside))
        ranks[here] = inside[assign_under_limit(rank_value[np.ix_(here, inside)], ones[here], limit)]
    return requests, ranks


def homes_per_token(
    request: NDArray[np.int64], requests: NDArray[np.int64], ranks: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Spread homes over tokens: request [T], requests [Q] ascending, ranks [Q] -> [T]. Every request must be listed."""
    return ranks[np.searchsorted(requests, request)]


def telling_layers(trace: RoutingTrace) -> range:
    """The layers that requests are told apart by: all, or every n-th of a large model."""
    return range(0, trace.num_layers, -(-trace.num_layers * trace.num_experts // MOST_FEATURES))


def cluster_requests(trace: RoutingTrace, share: NDArray[np.float64], seed: int = 0) -> NDArray[np.int64]:
    """Tell requests apart by the experts they use: a unit [Q] for each request (ascending ids), loads by share [U].

    k-means on the square roots of usage frequencies (the Hellinger distance), in every n-th layer of a large model,
    with sizes held by `assign_under_limit`: the homes to plan for before any placement exists.
    """
    requests, owner = np.unique(trace.request, return_inverse=True)
    layers = telling_layers(trace)
    usage = np.zeros((len(requests), len(layers), trace.num_experts))
    for place, layer in enumerate(layers):
        flat = owner[:, None] * trace.num_experts + trace.experts[:, layer]
        usage[:, place] = np.bincount(flat.ravel(), minlength=usage[:, place].size).reshape(usage[:, place].shape)
    tokens = np.bincount(owner).astype(np.float64)
    point = np.sqrt(usage.reshape(len(requests), -1) / tokens[:, None] / trace.top_k)
    limit = share_limits(float(tokens.sum()), share, 1.05, float(tokens.max()))
    centre = _spread_centres(point, len(share), seed)
    cluster = np.zeros(len(requests), np.int64)
    for _ in range(12):
        cluster = assign_under_limit(point @ centre.T - (centre**2).sum(axis=1) / 2, tokens, limit)
        members = np.eye(len(share))[cluster] * tokens[:, None]
        centre = (members.T @ point) / np.maximum(members.sum(axis=0), 1)[:, None]
    return cluster


def _spread_centres(point: NDArray[np.float64], num: int, seed: int) -> NDArray[np.float64]:
    """k-means++ starts: each next centre drawn by its squared distance from the nearest so far."""
    rng = np.random.default_rng(seed)
    centres = [point[rng.integers(len(point))]]
    distance = ((point - centres[0]) ** 2).sum(axis=1)
    for _ in range(num - 1):
        total = distance.sum()
        chance = distance / total if total > 0 else np.full(len(point), 1 / len(point))
        centres.append(point[rng.choice(len(point), p=chance)])
        distance = np.minimum(distance, ((point - centres[-1]) ** 2).sum(axis=1))
    return np.array(centres)
