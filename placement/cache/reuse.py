"""A model of reuse that learns while it serves: how likely is each expert to be used when its layer runs next?

A logistic model. For the expert e of layer l, d layers ahead of the layer that runs now, it sums
- a bias of the expert, and how often it was used lately (five recency-weighted frequencies and the last step; weights
  depend on d);
- what the layers that ran last chose: a weight context[l, d + m, e', e] for every expert e' that ran m layers ago
  (m = 0 to 5; across tokens too). For d up to L this is what transitions know about the present token, and about the
  next one.
It is trained online by AdaGrad (Duchi et al., 2011) on each layer as it runs, from a cutoff d that is drawn at random;
so it follows the traffic, and costs a few thousand multiplications a layer. A second, simpler model says how likely a
use is later, after a step without one. `reuse_value` turns both into what the slot is worth: the discounted next use.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.values import layers_until

DECAYS = np.array([0.0, 0.5, 0.8, 0.93, 0.98, 0.997], np.float32)
FREQUENCY_FLOOR = 0.003
LOG_SHIFT = 3.0
LOOK_BACK = 6
LOOK_BACK_DECAY = 0.85
CONTEXT_BYTES = 64 << 20
CONTEXT_RATE, LINEAR_RATE, FAR_RATE, FAR_BIAS_RATE = 0.1, 0.05, 0.03, 0.003
FULL_WEIGHT_EXPERTS = 8


class ReuseState(NamedTuple):
    """F features, D the layers that context reaches back. used, features, older [L, E, F]; near_* and far_* the weights
    of the two models and their sums of squared gradients; ring [R, E] and ring_size [R]: what the last R layers chose.
    """

    used: NDArray[Any]
    features: NDArray[Any]
    older: NDArray[Any]
    near_weight: NDArray[Any]
    near_weight_squares: NDArray[Any]
    near_bias: NDArray[Any]
    near_bias_squares: NDArray[Any]
    context: NDArray[Any]
    context_squares: NDArray[Any]
    far_weight: NDArray[Any]
    far_weight_squares: NDArray[Any]
    far_bias: NDArray[Any]
    ring: NDArray[Any]
    ring_size: NDArray[Any]


def new_reuse(num_layers: int, num_experts: int, *, top_k: int) -> ReuseState:
    """A model that has seen nothing. Context reaches two steps back, or as far as 64 MiB of weights go."""
    layers, experts, kinds = num_layers, num_experts, len(DECAYS)
    reach = min(2 * layers, max(1, CONTEXT_BYTES // (layers * experts * experts * 4)))
    used = np.full((layers, experts, kinds), top_k / experts, np.float32)
    features = (np.log(used + np.float32(FREQUENCY_FLOOR)) + np.float32(LOG_SHIFT)).astype(np.float32)

    def zeros(*shape: int) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    return ReuseState(
        used=used,
        features=features,
        older=features.copy(),
        near_weight=np.full((layers, kinds), 0.15, np.float32),
        near_weight_squares=zeros(layers, kinds),
        near_bias=np.full((layers, experts), -2.0, np.float32),
        near_bias_squares=zeros(layers, experts),
        context=zeros(layers, reach, experts, experts),
        context_squares=zeros(layers, reach, experts, experts),
        far_weight=np.full(kinds, 0.15, np.float32),
        far_weight_squares=zeros(kinds),
        far_bias=np.full((layers, experts), -2.0, np.float32),
        ring=np.zeros((2 * layers + LOOK_BACK + 1, experts), np.int32),
        ring_size=np.zeros(2 * layers + LOOK_BACK + 1, np.int32),
    )


def discount_for(share: float) -> float:
    """The discount per step for slots that hold this share of all experts: few slots look at the next step alone."""
    return min(0.95, 0.2 + share)


@njit(cache=True, fastmath=True)
def near_chance(state: ReuseState, clock: int, now: int, layer: int, expert: int) -> float:
    """The chance that layer `layer` uses the expert when it runs next, while layer `now` runs as number `clock`."""
    distance = layers_until(state.used.shape[0], now, layer)
    logit = state.near_bias[layer, expert]
    for kind in range(len(DECAYS)):
        logit += state.near_weight[distance - 1, kind] * state.features[layer, expert, kind]
    weight = np.float32(1.0)
    for back in range(LOOK_BACK):
        if distance + back <= state.context.shape[1] and clock - back >= 0:
            row = (clock - back) % len(state.ring)
            scale = weight * _scale(state.ring_size[row])
            for index in range(state.ring_size[row]):
                logit += scale * state.context[layer, distance + back - 1, state.ring[row, index], expert]
        weight *= np.float32(LOOK_BACK_DECAY)
    return 1.0 / (1.0 + math.exp(-logit))


@njit(cache=True, fastmath=True)
def far_chance(state: ReuseState, layer: int, expert: int) -> float:
    """The chance of a use in a later step, knowing only how often the expert was used lately."""
    logit = state.far_bias[layer, expert]
    for kind in range(len(DECAYS)):
        logit += state.far_weight[kind] * state.features[layer, expert, kind]
    return 1.0 / (1.0 + math.exp(-logit))


@njit(cache=True, fastmath=True)
def reuse_value(state: ReuseState, discount: float, clock: int, now: int, layer: int, expert: int) -> float:
    """The expected discount ** (steps until the next use): near chance first, then a wait with the far chance."""
    num_layers = state.used.shape[0]
    near = near_chance(state, clock, now, layer, expert)
    far = far_chance(state, layer, expert)
    later = discount * far / (1.0 - discount * (1.0 - far))
    distance = layers_until(num_layers, now, layer)
    return float(discount ** (distance / num_layers) * (near + (1.0 - near) * later))


@njit(cache=True)
def learn_uses(state: ReuseState, clock: int, layer: int, experts: NDArray[Any]) -> None:
    """Layer `layer` has just used these experts as number `clock`."""
    num_layers, num_experts = state.near_bias.shape
    outcome = np.zeros(num_experts, np.float32)
    for expert in experts:
        outcome[expert] = 1.0
    if clock >= num_layers:
        _learn_near(state, clock, layer, outcome, 1 + _scatter(clock) % num_layers)
        _learn_far(state, layer, outcome)
    state.older[layer] = state.features[layer]
    for expert in range(num_experts):
        for kind in range(len(DECAYS)):
            used = DECAYS[kind] * state.used[layer, expert, kind] + (1 - DECAYS[kind]) * outcome[expert]
            state.used[layer, expert, kind] = used
            state.features[layer, expert, kind] = math.log(used + FREQUENCY_FLOOR) + LOG_SHIFT
    row = clock % len(state.ring)
    state.ring_size[row] = len(experts)
    for index in range(len(experts)):
        state.ring[row, index] = experts[index]


@njit(cache=True)
def _scatter(clock: int) -> int:
    # Fibonacci hashing: cutoffs as good as random, and the same in every run.
    return (clock * 2654435761 % (1 << 32)) >> 8


@njit(cache=True)
def _scale(num_chosen: int) -> np.float32:
    # A layer that served many tokens chose many experts: together they should not outweigh all else.
    return np.float32(min(1.0, FULL_WEIGHT_EXPERTS / max(num_chosen, 1)))


@njit(cache=True, fastmath=True)
def _learn_near(state: ReuseState, clock: int, layer: int, outcome: NDArray[Any], distance: int) -> None:
    num_experts = len(outcome)
    cutoff = clock - distance
    error = np.empty(num_experts, np.float32)
    for expert in range(num_experts):
        error[expert] = state.near_bias[layer, expert]
        for kind in range(len(DECAYS)):
            error[expert] += state.near_weight[distance - 1, kind] * state.features[layer, expert, kind]
    weight = np.float32(1.0)
    for back in range(min(LOOK_BACK, cutoff + 1, state.context.shape[1] - distance + 1)):
        row = (cutoff - back) % len(state.ring)
        scale = weight * _scale(state.ring_size[row])
        for index in range(state.ring_size[row]):
            context = state.context[layer, distance + back - 1, state.ring[row, index]]
            for expert in range(num_experts):
                error[expert] += scale * context[expert]
        weight *= np.float32(LOOK_BACK_DECAY)
    for expert in range(num_experts):
        error[expert] = 1 / (1 + math.exp(-error[expert])) - outcome[expert]
    _step_linear(state, layer, distance, error)
    weight = np.float32(1.0)
    for back in range(min(LOOK_BACK, cutoff + 1, state.context.shape[1] - distance + 1)):
        row = (cutoff - back) % len(state.ring)
        scale = weight * _scale(state.ring_size[row])
        for index in range(state.ring_size[row]):
            context = state.context[layer, distance + back - 1, state.ring[row, index]]
            squares = state.context_squares[layer, distance + back - 1, state.ring[row, index]]
            for expert in range(num_experts):
                slope = scale * error[expert]
                squares[expert] += slope * slope
                context[expert] -= np.float32(CONTEXT_RATE) * slope / math.sqrt(squares[expert] + np.float32(0.1))
        weight *= np.float32(LOOK_BACK_DECAY)


@njit(cache=True, fastmath=True)
def _step_linear(state: ReuseState, layer: int, distance: int, error: NDArray[Any]) -> None:
    num_experts = len(error)
    for expert in range(num_experts):
        state.near_bias_squares[layer, expert] += error[expert] ** 2
        state.near_bias[layer, expert] -= (
            LINEAR_RATE * error[expert] / math.sqrt(state.near_bias_squares[layer, expert] + 1.0)
        )
    for kind in range(len(DECAYS)):
        slope = 0.0
        for expert in range(num_experts):
            slope += error[expert] * state.features[layer, expert, kind]
        slope /= num_experts
        state.near_weight_squares[distance - 1, kind] += slope * slope
        state.near_weight[distance - 1, kind] -= (
            LINEAR_RATE * slope / math.sqrt(state.near_weight_squares[distance - 1, kind] + 1e-4)
        )


@njit(cache=True, fastmath=True)
def _learn_far(state: ReuseState, layer: int, outcome: NDArray[Any]) -> None:
    num_experts = len(outcome)
    slopes = np.zeros(len(DECAYS), np.float64)
    for expert in range(num_experts):
        logit = state.far_bias[layer, expert]
        for kind in range(len(DECAYS)):
            logit += state.far_weight[kind] * state.older[layer, expert, kind]
        error = 1.0 / (1.0 + math.exp(-logit)) - outcome[expert]
        state.far_bias[layer, expert] -= FAR_BIAS_RATE * error
        for kind in range(len(DECAYS)):
            slopes[kind] += error * state.older[layer, expert, kind] / num_experts
    for kind in range(len(DECAYS)):
        state.far_weight_squares[kind] += slopes[kind] ** 2
        state.far_weight[kind] -= FAR_RATE * slopes[kind] / math.sqrt(state.far_weight_squares[kind] + 1e-4)
