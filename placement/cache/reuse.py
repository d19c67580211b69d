"""A model of reuse that learns while it serves: how likely is each expert to be used when its layer runs next?

A logistic model. For the expert e of layer l, d layers ahead of the layer that runs now, it sums
- a bias of the expert, and how often it was used lately (five recency-weighted frequencies and the last step; weights
  depend on d);
- what the layers that ran last chose: a weight context[l, d + m, e', e] for every expert e' that ran m layers ago
  (m = 0 to 5; across tokens too). For d up to L this is what transitions know about the present token, and about the
  next one;
- what came next when the last steps came before (`placement.cache.matching`).
A second model says how likely a use is later, after a step without one: by frequencies alone where many tokens run at
once, else as `placement.cache.later` has it. `value_of` turns both into what a slot is worth: the discounted next use.
How they are trained is in `placement.cache.learning`.

Nothing here is compiled with fast mathematics, so that the plain version in the tests gives the same bits. The loops
run over a layer's experts innermost, which lie side by side: eight and more are computed at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.matching import Matching, add_guess, guess_next
from placement.cache.values import layers_until
from placement.cache.vectors import add_rows, logs_of, to_chances

DECAYS = np.array([0.0, 0.5, 0.8, 0.93, 0.98, 0.997], np.float32)
FREQUENCY_FLOOR = np.float32(0.003)
LOG_SHIFT = np.float32(3.0)
LOOK_BACK = 6
LOOK_BACK_DECAY = np.float32(0.85)
CONTEXT_BYTES = 64 << 20
FULL_WEIGHT_EXPERTS = 8
LATER_STEPS, LATER_WORTH = 10, 0.6


class ReuseState(NamedTuple):
    """F features, D the layers that context reaches back. used, features, older [L, F, E]; near_* and far_* the weights
    of the two models and their sums of squared gradients; context [L, D, E, E]; ring [R, E] and ring_size [R]: what the
    last R layers chose. later_* the weights of `placement.cache.later`, later_context [L, M, E, E]; snapshots
    [L, LATER_STEPS + 1, F, E] features as they were; crowd [1]: more experts than that are of several requests; later
    [L, E] the chance of a use in a later step, as of the layer's last run; matching: of steps that were alike.
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
    later_context: NDArray[Any]
    later_squares: NDArray[Any]
    later_bias: NDArray[Any]
    later_bias_squares: NDArray[Any]
    later_weight: NDArray[Any]
    later_weight_squares: NDArray[Any]
    snapshots: NDArray[Any]
    crowd: NDArray[Any]
    later: NDArray[Any]
    matching: Matching


def reach_of(num_layers: int, num_experts: int) -> int:
    """How many layers context reaches back: two steps (`later`: one), or as far as 64 MiB of weights go."""
    return min(2 * num_layers, max(1, CONTEXT_BYTES // (num_layers * num_experts * num_experts * 4)))


@njit(cache=True)
def rows_of(num_layers: int) -> int:
    """How many layers' choices are remembered: those that `later` learns from, and those that near looks back on."""
    return int((LATER_STEPS + 1) * num_layers + LOOK_BACK + 1)


def fill_new(state: ReuseState, *, top_k: int) -> None:
    """Make zeros a model that has seen nothing."""
    state.used[:] = top_k / state.used.shape[2]
    for layer in range(len(state.used)):
        find_features(state, layer)
    state.older[:] = state.features
    state.snapshots[:] = state.features[:, None]
    state.near_weight[:] = state.far_weight[:] = state.later_weight[:] = 0.15
    state.near_bias[:] = state.far_bias[:] = state.later_bias[:] = -2.0
    state.crowd[:] = 2 * top_k
    state.matching.weight[:, :, 0] = 1.0
    for layer in range(len(state.later)):
        state.later[layer] = far_chances(state, layer, state.features[layer])


def discount_for(share: float) -> float:
    """The discount per step for slots that hold this share of all experts: few slots look at the next step alone."""
    return min(0.95, 0.2 + share)


@njit(cache=True)
def near_logits(state: ReuseState, clock: int, now: int, layer: int, logits: NDArray[Any]) -> None:
    """The near model's logits [E] of a layer's experts, while layer `now` runs as number `clock`: written to logits."""
    logits_at(state, clock, layer, layers_until(state.used.shape[0], now, layer), logits)


@njit(cache=True)
def logits_at(state: ReuseState, clock: int, layer: int, distance: int, logits: NDArray[Any]) -> None:
    """The same for a layer that runs `distance` layers after number `clock`."""
    logits[:] = state.near_bias[layer]
    for kind in range(len(DECAYS)):
        weight = state.near_weight[distance - 1, kind]
        feature = state.features[layer, kind]
        for expert in range(len(logits)):
            logits[expert] += weight * feature[expert]
    guess = np.empty_like(logits)
    length = guess_next(state.matching, clock, distance, guess)
    if length >= 0:
        add_guess(state.matching, distance, length, guess, logits)
    add_context(state, clock, layer, distance, logits)


@njit(cache=True)
def add_context(state: ReuseState, clock: int, layer: int, distance: int, logits: NDArray[Any]) -> None:
    """Add what the last layers up to number `clock` say of a layer that runs distance layers after that one."""
    weight = np.float32(1.0)
    for back in range(min(LOOK_BACK, clock + 1, state.context.shape[1] - distance + 1)):
        row = (clock - back) % len(state.ring)
        scale = weight * scale_for(state.ring_size[row])
        chosen = state.ring[row, : state.ring_size[row]]
        add_rows(state.context[layer, distance + back - 1], chosen, scale, logits)
        weight *= LOOK_BACK_DECAY


@njit(cache=True)
def scale_for(num_chosen: int) -> np.float32:
    """A layer that served many tokens chose many experts: together they should not outweigh all else."""
    return np.float32(min(1.0, FULL_WEIGHT_EXPERTS / max(num_chosen, 1)))


@njit(cache=True)
def find_features(state: ReuseState, layer: int) -> None:
    """What the frequencies of a layer's experts say, on a scale that the models can add up."""
    used, features = state.used[layer].reshape(-1), state.features[layer].reshape(-1)
    shifted = np.empty_like(used)
    for index in range(len(used)):
        shifted[index] = used[index] + FREQUENCY_FLOOR
    logs_of(shifted, features)
    for index in range(len(used)):
        features[index] += LOG_SHIFT


@njit(cache=True)
def far_chances(state: ReuseState, layer: int, features: NDArray[Any]) -> NDArray[Any]:
    """The chances [E] of a use in a later step, knowing only how often the experts were used lately: `features`."""
    chances: NDArray[Any] = state.far_bias[layer].copy()
    for kind in range(len(DECAYS)):
        weight = state.far_weight[kind]
        for expert in range(len(chances)):
            chances[expert] += weight * features[kind, expert]
    to_chances(chances)
    return chances


@njit(cache=True)
def value_of(near: float, far: float, discount: float, until: float) -> float:
    """The expected discount ** (steps until the next use): near chance first, then a wait with the far chance.

    until: discount ** (steps until the layer runs next), which are 1 / L to 1.
    """
    later = discount * far / (1.0 - discount * (1.0 - far))
    return float(until * (near + (1.0 - near) * later))
