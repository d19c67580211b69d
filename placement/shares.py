"""Shares: the ranks' weights in the replica choice, drawn so that the load is level. Nothing is copied for it.

A token that comes by several holders of an expert takes one of them by the ranks' weights. Lowering the weight of a
rank with too much load moves load to the other holders at no cost in visits, so this is the fastest of the loops.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import EVEN_WEIGHT, Placement
from placement.dispatch import holders_of, serve_token
from placement.evaluate import check_fit
from placement.topology import Topology
from placement.trace import RoutingTrace

ROUNDS = 24
STEEPNESS = 2.0
COUNT_ROUNDS = 60
MOST_PRICE = 32.0
SAMPLED_TOKENS = 20_000


@nb.njit(cache=True, nogil=True)
def _find_choices(chosen: Any, home: Any, holds: Any, node_of_rank: Any, fixed: Any) -> Any:
    """What the weights can decide: choices [n, X] of ranks, -1 pads, that a token comes by and that hold one expert.

    fixed [R] gets the (token, expert) pairs that can go to one rank alone.
    """
    table, count = holders_of(holds)
    mark = np.full(2 * len(node_of_rank), -1, np.int64)
    needs = np.zeros(chosen.shape[1], np.bool_)
    served = np.empty(chosen.shape[1], np.int32)
    choices = np.full((chosen.size, table.shape[1]), -1, np.int16)
    num_choices = 0
    for token in range(len(chosen)):
        serve_token(chosen[token], home[token], holds, table, count, node_of_rank, mark, token, needs, served)
        for k in range(len(served)):
            if served[k] < 0:
                continue
            near = 0
            for i in range(count[chosen[token, k]]):
                rank = table[chosen[token, k], i]
                if mark[rank] == token:
                    choices[num_choices, near] = rank
                    near += 1
            if near > 1:
                num_choices += 1
            else:
                choices[num_choices] = -1
                fixed[served[k]] += 1
    return choices[:num_choices]


@nb.njit(cache=True, nogil=True)
def _share_out(choices: Any, weights: Any, load: Any) -> None:
    """Add to load [R] what each rank is expected to serve of the choices."""
    for choice in choices:
        total = 0.0
        for rank in choice:
            if rank >= 0:
                total += weights[rank]
        for rank in choice:
            if rank >= 0:
                load[rank] += weights[rank] / total


@nb.njit(cache=True, nogil=True)
def _adjust(price: Any, load: Any, step: Any, weights: Any) -> None:
    """Raise or lower each rank's price [R] by how far its load is from the mean; weights [R] as whole numbers."""
    mean = load.mean()
    for rank in range(len(price)):
        price[rank] *= ((mean + 1e-3 * mean) / (load[rank] + 1e-3 * mean)) ** step
    price /= np.exp(np.log(price).mean())
    for rank in range(len(price)):
        price[rank] = min(MOST_PRICE, max(1 / MOST_PRICE, price[rank]))
        weights[rank] = np.uint16(round(price[rank] * EVEN_WEIGHT))


@nb.njit(cache=True, nogil=True)
def level_weights(rows: Any, load: Any, weights: Any) -> None:
    """Draw weights [R] uint16 in place from loads alone: rows [R, C] of one layer (-1 empty), load [E].

    Every holder of an expert counts as near; the weights kept are the best found, by the heaviest rank's load.
    """
    price, total, trial = weights / EVEN_WEIGHT, np.zeros(len(rows)), weights.copy()
    weight = np.zeros(len(load))
    lightest = np.inf
    for number in range(COUNT_ROUNDS):
        weight[:] = 0
        for rank in range(len(rows)):
            for expert in rows[rank]:
                if expert >= 0:
                    weight[expert] += trial[rank]
        for rank in range(len(rows)):
            total[rank] = 0
            for expert in rows[rank]:
                if expert >= 0:
                    total[rank] += load[expert] * trial[rank] / weight[expert]
        if total.sum() <= 0:
            return
        if total.max() < lightest * (1 - 1e-9):
            lightest = total.max()
            weights[:] = trial
        _adjust(price, total, STEEPNESS * (1 - number / COUNT_ROUNDS), trial)


def load_per_rank(placement: Placement, load: NDArray[Any]) -> NDArray[np.float64]:
    """[L, R]: each expert's load [L, E] shared by its holders' weights, as if all were near."""
    weights = placement.weights_per_rank().astype(np.float64)
    per_rank: NDArray[np.float64] = np.einsum("lre,le->lr", weights, load / weights.sum(axis=1))
    return per_rank


@nb.njit(cache=True, nogil=True)
def _level_layer(chosen: Any, home: Any, holds: Any, node_of_rank: Any, weights: Any) -> None:
    """weights [R] uint16 in place, all alike before: the best found, by the heaviest rank's expected load."""
    fixed = np.zeros(len(weights))
    choices = _find_choices(chosen, home, holds, node_of_rank, fixed)
    price, trial = weights / EVEN_WEIGHT, weights.copy()
    lightest = np.inf
    for number in range(ROUNDS):
        load = fixed.copy()
        _share_out(choices, trial, load)
        if load.max() < lightest * (1 - 1e-9):
            lightest = load.max()
            weights[:] = trial
        _adjust(price, load, STEEPNESS * (1 - number / ROUNDS), trial)


def level_shares(
    placement: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    *,
    sampled_tokens: int = SAMPLED_TOKENS,
    seed: int = 0,
) -> Placement:
    """The placement with weights that level its load on the trace. homes [T]. Raises as `check_fit`."""
    check_fit(placement, topology, trace)
    if placement.num_slots == placement.num_experts:
        return placement
    pick = np.sort(np.random.default_rng(seed).permutation(trace.num_tokens)[:sampled_tokens])
    home = np.ascontiguousarray(homes[pick], np.int32)
    even = replace(placement, rank_weights=np.zeros((0, 0), np.uint16)).weights_per_rank()
    weights = np.full((placement.num_layers, placement.num_ranks), EVEN_WEIGHT, np.uint16)
    node_of_rank = np.ascontiguousarray(topology.node_of_rank())

    def level(layer: int) -> None:
        chosen = np.ascontiguousarray(trace.experts[pick, layer], np.int32)
        _level_layer(chosen, home, even[layer], node_of_rank, weights[layer])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(level, range(placement.num_layers)))
    return replace(placement, rank_weights=weights)
