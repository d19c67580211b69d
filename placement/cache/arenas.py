"""Shares of the layers: how many slots each layer's arena gets, by what it would gain from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.stream import LookupStream


def equal_shares(num_layers: int, num_slots: int) -> NDArray[np.int64]:
    """[L] slots a layer, as even as can be, one at least."""
    return np.maximum(1, np.diff(np.arange(num_layers + 1) * num_slots // num_layers))


def shares_by_need(stream: LookupStream, num_slots: int) -> NDArray[np.int64]:
    """[L] slots a layer so that LRU arenas of these sizes together hit most on the stream.

    From stack distances (Mattson et al., 1970): a lookup hits in every arena that is larger than the number of other
    experts used since. Slots go one by one to the layer whose curve gains most, looking ahead over flat parts.
    """
    distances = _stack_distances(stream.ids, stream.offsets, stream.num_layers, stream.num_experts)
    hits = np.concatenate([np.zeros((stream.num_layers, 1)), np.cumsum(distances, axis=1)], axis=1)
    shares = np.ones(stream.num_layers, np.int64)
    left = num_slots - stream.num_layers
    while left > 0:
        best_rate, best_layer, best_step = -1.0, -1, 0
        for layer, have in enumerate(shares):
            ahead = hits[layer, have + 1 : have + 1 + left] - hits[layer, have]
            if len(ahead):
                rates = ahead / np.arange(1, len(ahead) + 1)
                step = int(rates.argmax())
                if rates[step] > best_rate:
                    best_rate, best_layer, best_step = float(rates[step]), layer, step + 1
        if best_layer < 0:
            break
        shares[best_layer] += best_step
        left -= best_step
    return shares


@njit(cache=True)
def _stack_distances(ids: NDArray[Any], offsets: NDArray[Any], num_layers: int, num_experts: int) -> NDArray[Any]:
    """[L, E]: lookups of a layer that hit in an arena of d + 1 slots and no smaller one, at [l, d]."""
    found = np.zeros((num_layers, num_experts), np.float64)
    stack = np.full((num_layers, num_experts), -1, np.int64)
    for run in range(len(offsets) - 1):
        layer = run % num_layers
        for expert in ids[offsets[run] : offsets[run + 1]]:
            depth = 0
            while depth < num_experts and stack[layer, depth] != expert and stack[layer, depth] >= 0:
                depth += 1
            if depth < num_experts and stack[layer, depth] == expert:
                found[layer, depth] += 1
            depth = min(depth, num_experts - 1)
            for index in range(depth, 0, -1):
                stack[layer, index] = stack[layer, index - 1]
            stack[layer, 0] = expert
    return found
