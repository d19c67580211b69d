"""What an expert in a slot is worth under the classic policies. Higher stays longer.

LRU: when it was used last. LFU: how often. LRU with frequency (Lee et al., 2001, "LRFU"): uses, each of which halves in
weight after seven steps. NEXT_USE: the expected number of layers until the next use, from the layer's distance and the
chance of use per step, where the chance is a recency-weighted frequency.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit
from numpy.typing import NDArray

LRU, LFU, LRFU, NEXT_USE, REUSE = 0, 1, 2, 3, 4
LRFU_DECAY = 0.9
FAST_DECAY, SLOW_DECAY = 0.8, 0.98
CHANCE_FLOOR = 1e-3


class UseHistory(NamedTuple):
    """last [L, E] clock of the last use (-1: never); uses, recent, fast, slow [L, E] so weighted; visits [L]."""

    last: NDArray[Any]
    uses: NDArray[Any]
    recent: NDArray[Any]
    fast: NDArray[Any]
    slow: NDArray[Any]
    visits: NDArray[Any]


@njit(cache=True)
def note_uses(history: UseHistory, clock: int, layer: int, experts: NDArray[Any]) -> None:
    """Layer `layer` has just used these experts. clock counts layers since the start."""
    history.visits[layer] += 1
    for expert in range(history.last.shape[1]):
        history.recent[layer, expert] *= LRFU_DECAY
        history.fast[layer, expert] *= FAST_DECAY
        history.slow[layer, expert] *= SLOW_DECAY
    for expert in experts:
        history.last[layer, expert] = clock
        history.uses[layer, expert] += 1.0
        history.recent[layer, expert] += 1.0
        history.fast[layer, expert] += 1.0 - FAST_DECAY
        history.slow[layer, expert] += 1.0 - SLOW_DECAY


@njit(cache=True)
def layers_until(num_layers: int, now: int, layer: int) -> int:
    """How many layers from now until `layer` runs again: 1 to L. The layer that runs now comes again after all."""
    distance = (layer - now) % num_layers
    return num_layers if distance == 0 else distance


@njit(cache=True)
def classic_value(kind: int, history: UseHistory, now: int, layer: int, expert: int) -> float:
    """The value of an expert while layer `now` runs."""
    if kind == LRU:
        return float(history.last[layer, expert])
    if kind == LFU:
        return float(history.uses[layer, expert])
    if kind == LRFU:
        return float(history.recent[layer, expert])
    num_layers = len(history.visits)
    warm = 1.0 - SLOW_DECAY ** max(history.visits[layer], 1)
    chance = 0.5 * history.fast[layer, expert] + 0.5 * history.slow[layer, expert] / warm
    chance = min(max(chance, CHANCE_FLOOR), 1.0)
    return float(-(layers_until(num_layers, now, layer) + num_layers * (1.0 / chance - 1.0)))
