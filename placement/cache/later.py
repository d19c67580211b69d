"""What comes after the next step, where one token runs at a time: if that step leaves an expert unused, how long does
it wait?

A logistic model of its own for the expert e of layer l, asked right after l ran: a bias, how often the expert was used
lately, how long it waited when the last steps came before (`placement.cache.matching`), and what each layer chose last:
a weight later_context[l, m, e', e] for every expert e' that ran m layers ago (m = 0 to L - 1, so once round the model:
what a text is about shows in all layers). It learns the discounted wait itself: ten steps later it is known how long an
expert was not needed, and the target is 0.6 ** (steps beyond the second).

Where a layer chose more experts than two tokens do, several requests are mixed: the chance by frequencies alone
(`far_chance`) is then the better one, and is what counts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.cache.matching import LATER, add_guess, guess_later, learn_guess, mean_product
from placement.cache.reuse import (
    DECAYS,
    LATER_STEPS,
    LATER_WORTH,
    ReuseState,
    far_chances,
    scale_for,
)
from placement.cache.vectors import add_rows, learn_row, to_chances

LATER_RATE, LATER_SHIFT = np.float32(0.03), np.float32(0.1)
LATER_BIAS_RATE, LATER_BIAS_SHIFT = np.float32(0.05), np.float32(1.0)
LATER_WEIGHT_RATE, LATER_WEIGHT_SHIFT = 0.03, 1e-4
PATIENCE, MOST_PATIENT = 0.1, 0.95
USED_NEXT = np.float32(-1.0)
WORTHS = np.array([0.0, USED_NEXT, *(LATER_WORTH**steps for steps in range(LATER_STEPS - 1))], np.float32)


@njit(cache=True, error_model="numpy")
def foresee(state: ReuseState, clock: int, layer: int) -> None:
    """Layer `layer` has just run as number `clock`: learn from what ran ten steps ago, and say what comes later now."""
    learn_later(state, clock, layer)
    snapshots, later = state.snapshots[layer], state.later[layer]
    snapshots[clock // len(state.snapshots) % len(snapshots)] = state.features[layer]
    if crowded(state, clock):
        later[:] = far_chances(state, layer, state.features[layer])
        return
    worths = np.empty(len(later), np.float32)
    later_logits(state, clock, layer, state.features[layer], worths)
    to_chances(worths)
    for expert in range(len(later)):
        worth = np.float64(worths[expert])
        later[expert] = worth * (1.0 - LATER_WORTH) / (1.0 - LATER_WORTH * worth)


@njit(cache=True)
def crowded(state: ReuseState, clock: int) -> bool:
    """Whether the layer that ran as number `clock` served more than two tokens."""
    return bool(state.ring_size[clock % len(state.ring)] > state.crowd[0])


@njit(cache=True)
def discount_now(state: ReuseState, clock: int, discount: float) -> float:
    """The discount per step to value slots with: who sees later uses better can wait for them longer."""
    return discount if crowded(state, clock) else min(MOST_PATIENT, discount + PATIENCE)


@njit(cache=True)
def later_logits(state: ReuseState, clock: int, layer: int, features: NDArray[Any], logits: NDArray[Any]) -> None:
    """The logits [E] of a layer that has run as number `clock`, its features [F, E] then: written to logits."""
    logits[:] = state.later_bias[layer]
    for kind in range(len(DECAYS)):
        weight, feature = state.later_weight[kind], features[kind]
        for expert in range(len(logits)):
            logits[expert] += weight * feature[expert]
    guess = np.empty_like(logits)
    length = guess_later(state.matching, clock, WORTHS, guess)
    if length >= 0:
        add_guess(state.matching, LATER, length, guess, logits)
    for back in range(min(clock + 1, state.later_context.shape[1])):
        row = (clock - back) % len(state.ring)
        scale = scale_for(state.ring_size[row])
        add_rows(state.later_context[layer, back], state.ring[row, : state.ring_size[row]], scale, logits)


@njit(cache=True, error_model="numpy")
def learn_later(state: ReuseState, clock: int, layer: int) -> None:
    """AdaGrad on what the layer could know LATER_STEPS of its runs before number `clock`."""
    num_layers = len(state.snapshots)
    before = clock - LATER_STEPS * num_layers
    if before < 0 or crowded(state, before):
        return
    error = np.zeros(state.later_bias.shape[1], np.float32)
    features = state.snapshots[layer, before // num_layers % state.snapshots.shape[1]]
    later_logits(state, before, layer, features, error)
    to_chances(error)
    worths = _worths(state, before)
    for expert in range(len(error)):
        error[expert] -= worths[expert]
        if worths[expert] == USED_NEXT:
            error[expert] = 0.0
    bias, squares = state.later_bias[layer], state.later_bias_squares[layer]
    for expert in range(len(error)):
        squares[expert] += error[expert] * error[expert]
        bias[expert] -= LATER_BIAS_RATE * error[expert] / np.sqrt(squares[expert] + LATER_BIAS_SHIFT)
    for kind in range(len(DECAYS)):
        slope = mean_product(error, features[kind])
        state.later_weight_squares[kind] += slope * slope
        spread = math.sqrt(np.float64(state.later_weight_squares[kind]) + LATER_WEIGHT_SHIFT)
        state.later_weight[kind] -= LATER_WEIGHT_RATE * slope / spread
    guess = np.empty_like(error)
    length = guess_later(state.matching, before, WORTHS, guess)
    if length >= 0:
        learn_guess(state.matching, LATER, length, guess, error)
    for back in range(min(before + 1, state.later_context.shape[1])):
        row = (before - back) % len(state.ring)
        scale = scale_for(state.ring_size[row])
        for index in range(state.ring_size[row]):
            chosen = state.ring[row, index]
            weights, squares = state.later_context[layer, back, chosen], state.later_squares[layer, back, chosen]
            learn_row(weights, squares, scale, error, LATER_RATE, LATER_SHIFT)


@njit(cache=True)
def _worths(state: ReuseState, before: int) -> NDArray[Any]:
    """[E]: the discounted wait of each expert after its layer ran as number `before`; USED_NEXT if none."""
    worths = np.zeros(state.later_bias.shape[1], np.float32)
    for ahead in range(LATER_STEPS, 0, -1):
        row = (before + ahead * len(state.snapshots)) % len(state.ring)
        for index in range(state.ring_size[row]):
            worths[state.ring[row, index]] = WORTHS[ahead]
    return worths
