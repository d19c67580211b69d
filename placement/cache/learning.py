"""How the model of reuse learns: AdaGrad (Duchi et al., 2011) on each layer as it runs, from a cutoff drawn at random.

So it follows the traffic, and costs a few thousand multiplications a layer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.later import crowded, foresee
from placement.cache.matching import guess_next, learn_guess, mean_product, note_run
from placement.cache.reuse import (
    DECAYS,
    LOOK_BACK,
    LOOK_BACK_DECAY,
    ReuseState,
    far_chances,
    find_features,
    logits_at,
    scale_for,
)
from placement.cache.vectors import learn_row, to_chances

CONTEXT_RATE, CONTEXT_SHIFT = np.float32(0.1), np.float32(0.1)
BIAS_RATE, BIAS_SHIFT = np.float32(0.05), np.float32(1.0)
WEIGHT_RATE, FAR_RATE, WEIGHT_SHIFT = 0.05, 0.03, 1e-4
FAR_BIAS_RATE = np.float32(0.003)
RESTS = np.float32(1.0) - DECAYS


@njit(cache=True)
def learn_uses(state: ReuseState, clock: int, layer: int, experts: NDArray[Any]) -> None:
    """Layer `layer` has just used these experts as number `clock`."""
    num_layers, num_experts = state.near_bias.shape
    outcome = np.zeros(num_experts, np.float32)
    for expert in experts:
        outcome[expert] = 1.0
    if clock >= num_layers:
        _learn_near(state, clock, layer, outcome, 1 + scatter(clock) % num_layers)
        _learn_far(state, layer, outcome)
    state.older[layer] = state.features[layer]
    for kind in range(len(DECAYS)):
        used, decay, rest = state.used[layer, kind], DECAYS[kind], RESTS[kind]
        for expert in range(num_experts):
            used[expert] = decay * used[expert] + rest * outcome[expert]
    find_features(state, layer)
    row = clock % len(state.ring)
    state.ring_size[row] = len(experts)
    state.ring[row, : len(experts)] = experts
    note_run(state.matching, clock, experts, crowded(state, clock))
    foresee(state, clock, layer)


@njit(cache=True)
def scatter(clock: int) -> int:
    """Fibonacci hashing: cutoffs as good as random, and the same in every run."""
    return (clock * 2654435761 % (1 << 32)) >> 8


@njit(cache=True, error_model="numpy")
def _learn_near(state: ReuseState, clock: int, layer: int, outcome: NDArray[Any], distance: int) -> None:
    cutoff = clock - distance
    error = np.empty_like(state.near_bias[layer])
    logits_at(state, cutoff, layer, distance, error)
    to_chances(error)
    for expert in range(len(error)):
        error[expert] -= outcome[expert]
    _step_linear(state, layer, distance, error)
    guess = np.empty_like(error)
    length = guess_next(state.matching, cutoff, distance, guess)
    if length >= 0:
        learn_guess(state.matching, distance, length, guess, error)
    weight = np.float32(1.0)
    for back in range(min(LOOK_BACK, cutoff + 1, state.context.shape[1] - distance + 1)):
        row = (cutoff - back) % len(state.ring)
        scale = weight * scale_for(state.ring_size[row])
        for index in range(state.ring_size[row]):
            before, chosen = distance + back - 1, state.ring[row, index]
            weights, squares = state.context[layer, before, chosen], state.context_squares[layer, before, chosen]
            learn_row(weights, squares, scale, error, CONTEXT_RATE, CONTEXT_SHIFT)
        weight *= LOOK_BACK_DECAY


@njit(cache=True, error_model="numpy")
def _step_linear(state: ReuseState, layer: int, distance: int, error: NDArray[Any]) -> None:
    bias, squares = state.near_bias[layer], state.near_bias_squares[layer]
    for expert in range(len(error)):
        squares[expert] += error[expert] * error[expert]
        bias[expert] -= BIAS_RATE * error[expert] / np.sqrt(squares[expert] + BIAS_SHIFT)
    for kind in range(len(DECAYS)):
        slope = mean_product(error, state.features[layer, kind])
        state.near_weight_squares[distance - 1, kind] += slope * slope
        spread = math.sqrt(np.float64(state.near_weight_squares[distance - 1, kind]) + WEIGHT_SHIFT)
        state.near_weight[distance - 1, kind] -= WEIGHT_RATE * slope / spread


@njit(cache=True)
def _learn_far(state: ReuseState, layer: int, outcome: NDArray[Any]) -> None:
    older, bias = state.older[layer], state.far_bias[layer]
    error = far_chances(state, layer, older)
    for expert in range(len(error)):
        error[expert] -= outcome[expert]
        bias[expert] -= FAR_BIAS_RATE * error[expert]
    for kind in range(len(DECAYS)):
        slope = mean_product(error, older[kind])
        state.far_weight_squares[kind] += slope * slope
        spread = math.sqrt(np.float64(state.far_weight_squares[kind]) + WEIGHT_SHIFT)
        state.far_weight[kind] -= FAR_RATE * slope / spread
