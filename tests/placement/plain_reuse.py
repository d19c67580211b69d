"""The model of reuse in plain Python, expert by expert: what the compiled one must agree with to the last bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from placement.cache.later import (
    LATER_BIAS_RATE,
    LATER_BIAS_SHIFT,
    LATER_RATE,
    LATER_SHIFT,
    LATER_WEIGHT_RATE,
    LATER_WEIGHT_SHIFT,
    MOST_PATIENT,
    PATIENCE,
)
from placement.cache.learning import (
    BIAS_RATE,
    BIAS_SHIFT,
    CONTEXT_RATE,
    CONTEXT_SHIFT,
    FAR_BIAS_RATE,
    FAR_RATE,
    RESTS,
    WEIGHT_RATE,
    WEIGHT_SHIFT,
)
from placement.cache.matching import (
    HISTORY_STEPS,
    KEY_FACTOR,
    KEY_PRIME,
    LATER,
    LONGEST,
    MATCH_RATE,
    MATCH_SHIFT,
    SEARCH_STEPS,
    WORD_BITS,
    Matching,
)
from placement.cache.reuse import (
    DECAYS,
    FREQUENCY_FLOOR,
    FULL_WEIGHT_EXPERTS,
    LATER_STEPS,
    LATER_WORTH,
    LOG_SHIFT,
    LOOK_BACK,
    LOOK_BACK_DECAY,
    ReuseState,
)
from placement.cache.vectors import (
    EXPONENT_BIAS,
    HALF,
    LARGEST_POWER,
    LN2,
    LOG,
    MANTISSA_BITS,
    ONE,
    PER_LN2,
    POWER,
    ROOT_OF_HALF_BITS,
)

KINDS = range(len(DECAYS))


def chance(logit: Any) -> Any:
    """The logistic function in float32: 2 ** (whole + rest)."""
    power = np.clip(-logit * PER_LN2, -LARGEST_POWER, LARGEST_POWER)
    whole = int(power + np.float32(EXPONENT_BIAS) + HALF) - EXPONENT_BIAS
    return ONE / (ONE + (_polynomial(POWER, power - np.float32(whole), ONE)) * np.float32(2.0**whole))


def log(value: Any) -> Any:
    """The natural logarithm in float32: of 2 ** whole * (1 + rest)."""
    bits = int(np.float32(value).view(np.int32))
    whole = (bits - ROOT_OF_HALF_BITS) >> MANTISSA_BITS
    rest = np.int32(bits - (whole << MANTISSA_BITS)).view(np.float32) - ONE
    square = rest * rest
    tail = _polynomial(LOG[:-1], rest, LOG[-1]) * rest * square
    return tail - HALF * square + rest + np.float32(whole) * LN2


def _polynomial(factors: Sequence[Any], x: Any, last: Any) -> Any:
    value = np.float32(0.0)
    for factor in (*factors, last):
        value = value * x + factor
    return value


def terms(state: ReuseState, clock: int, layer: int, distance: int) -> list[tuple[Any, int, int]]:
    """(weight, layers back, expert) of all that ran before and has something to say."""
    found, weight = [], np.float32(1.0)
    for back in range(LOOK_BACK):
        if distance + back > state.context.shape[1] or clock - back < 0:
            break
        row = (clock - back) % len(state.ring)
        scale = weight * np.float32(min(1.0, FULL_WEIGHT_EXPERTS / max(int(state.ring_size[row]), 1)))
        found += [(scale, distance + back - 1, int(expert)) for expert in state.ring[row, : state.ring_size[row]]]
        weight = weight * LOOK_BACK_DECAY
    return found


def near_logit(state: ReuseState, clock: int, layer: int, distance: int, expert: int) -> Any:
    logit = state.near_bias[layer, expert]
    for kind in KINDS:
        logit = logit + state.near_weight[distance - 1, kind] * state.features[layer, kind, expert]
    logit = _with_guess(state.matching, distance, _guess_next(state.matching, clock, distance, expert), logit)
    for scale, back, other in terms(state, clock, layer, distance):
        logit = logit + scale * state.context[layer, back, other, expert]
    return logit


def value(state: ReuseState, discount: float, clock: int, now: int, layer: int, expert: int) -> float:
    layers = state.used.shape[0]
    distance = (layer - now - 1) % layers + 1
    near = float(chance(near_logit(state, clock, layer, distance, expert)))
    if len(_ran(state, clock)) <= state.crowd[0]:
        discount = min(MOST_PATIENT, discount + PATIENCE)
    later = float(state.later[layer, expert])
    later = discount * later / (1.0 - discount * (1.0 - later))
    return float(discount ** (distance / layers) * (near + (1.0 - near) * later))


def learn(state: ReuseState, clock: int, layer: int, chosen: list[int]) -> None:
    layers, experts = state.near_bias.shape
    outcome = np.zeros(experts, np.float32)
    outcome[chosen] = 1.0
    if clock >= layers:
        _learn_near(state, clock, layer, outcome, 1 + ((clock * 2654435761 % (1 << 32)) >> 8) % layers)
        _learn_far(state, layer, outcome)
    state.older[layer] = state.features[layer]
    for kind in KINDS:
        for expert in range(experts):
            used = DECAYS[kind] * state.used[layer, kind, expert] + RESTS[kind] * outcome[expert]
            state.used[layer, kind, expert] = used
            state.features[layer, kind, expert] = log(used + FREQUENCY_FLOOR) + LOG_SHIFT
    row = clock % len(state.ring)
    state.ring_size[row] = len(chosen)
    state.ring[row, : len(chosen)] = chosen
    _note_run(state.matching, clock, chosen, crowded=len(chosen) > state.crowd[0])
    _foresee(state, clock, layer, chosen)


def _ran(state: ReuseState, clock: int) -> list[int]:
    row = clock % len(state.ring)
    return [int(expert) for expert in state.ring[row, : state.ring_size[row]]]


def _foresee(state: ReuseState, clock: int, layer: int, chosen: list[int]) -> None:
    layers, experts = state.near_bias.shape
    before = clock - LATER_STEPS * layers
    if before >= 0 and len(_ran(state, before)) <= state.crowd[0]:
        _learn_later(state, before, layer)
    state.snapshots[layer, clock // layers % (LATER_STEPS + 1)] = state.features[layer]
    for expert in range(experts):
        if len(chosen) > state.crowd[0]:
            logit = state.far_bias[layer, expert]
            for kind in KINDS:
                logit = logit + state.far_weight[kind] * state.features[layer, kind, expert]
            state.later[layer, expert] = chance(logit)
        else:
            worth = float(chance(_later_logit(state, clock, layer, state.features[layer], expert)))
            state.later[layer, expert] = worth * (1.0 - LATER_WORTH) / (1.0 - LATER_WORTH * worth)


def _later_terms(state: ReuseState, clock: int) -> list[tuple[Any, int, int]]:
    """(weight, layers back, expert) of the last round of all layers."""
    found = []
    for back in range(min(clock + 1, state.later_context.shape[1])):
        others = _ran(state, clock - back)
        scale = np.float32(min(1.0, FULL_WEIGHT_EXPERTS / max(len(others), 1)))
        found += [(scale, back, other) for other in others]
    return found


def _later_logit(state: ReuseState, clock: int, layer: int, features: Any, expert: int) -> Any:
    logit = state.later_bias[layer, expert]
    for kind in KINDS:
        logit = logit + state.later_weight[kind] * features[kind, expert]
    logit = _with_guess(state.matching, LATER, _guess_later(state.matching, clock, expert), logit)
    for scale, back, other in _later_terms(state, clock):
        logit = logit + scale * state.later_context[layer, back, other, expert]
    return logit


def _learn_later(state: ReuseState, before: int, layer: int) -> None:
    layers, experts = state.near_bias.shape
    features = state.snapshots[layer, before // layers % (LATER_STEPS + 1)].copy()
    error = np.zeros(experts, np.float32)
    for expert in range(experts):
        waits = [n for n in range(1, LATER_STEPS + 1) if expert in _ran(state, before + n * layers)]
        if waits[:1] != [1]:
            worth = np.float32(LATER_WORTH ** (waits[0] - 2)) if waits else np.float32(0.0)
            error[expert] = chance(_later_logit(state, before, layer, features, expert)) - worth
    for expert in range(experts):
        squares = state.later_bias_squares[layer, expert] + error[expert] * error[expert]
        state.later_bias_squares[layer, expert] = squares
        state.later_bias[layer, expert] -= LATER_BIAS_RATE * error[expert] / np.sqrt(squares + LATER_BIAS_SHIFT)
    for kind in KINDS:
        slope = sum(float(error[expert] * features[kind, expert]) for expert in range(experts)) / experts
        squares = np.float32(float(state.later_weight_squares[kind]) + slope * slope)
        state.later_weight_squares[kind] = squares
        step = LATER_WEIGHT_RATE * slope / math.sqrt(float(squares) + LATER_WEIGHT_SHIFT)
        state.later_weight[kind] = float(state.later_weight[kind]) - step
    guesses = [_guess_later(state.matching, before, expert) for expert in range(experts)]
    _learn_guess(state.matching, LATER, guesses, error)
    for scale, back, other in _later_terms(state, before):
        for expert in range(experts):
            step = scale * error[expert]
            squares = state.later_squares[layer, back, other, expert] + step * step
            state.later_squares[layer, back, other, expert] = squares
            state.later_context[layer, back, other, expert] -= LATER_RATE * step / np.sqrt(squares + LATER_SHIFT)


def _learn_near(state: ReuseState, clock: int, layer: int, outcome: Any, distance: int) -> None:
    experts, cutoff = range(len(outcome)), clock - distance
    error = [chance(near_logit(state, cutoff, layer, distance, expert)) - outcome[expert] for expert in experts]
    for expert in experts:
        squares = state.near_bias_squares[layer, expert] + error[expert] * error[expert]
        state.near_bias_squares[layer, expert] = squares
        state.near_bias[layer, expert] -= BIAS_RATE * error[expert] / np.sqrt(squares + BIAS_SHIFT)
    for kind in KINDS:
        slope = 0.0
        for expert in experts:
            slope += float(error[expert] * state.features[layer, kind, expert])
        slope /= len(outcome)
        squares = np.float32(float(state.near_weight_squares[distance - 1, kind]) + slope * slope)
        state.near_weight_squares[distance - 1, kind] = squares
        weight = float(state.near_weight[distance - 1, kind])
        state.near_weight[distance - 1, kind] = weight - WEIGHT_RATE * slope / math.sqrt(float(squares) + WEIGHT_SHIFT)
    guesses = [_guess_next(state.matching, cutoff, distance, expert) for expert in experts]
    _learn_guess(state.matching, distance, guesses, error)
    for scale, back, other in terms(state, cutoff, layer, distance):
        for expert in experts:
            step = scale * error[expert]
            squares = state.context_squares[layer, back, other, expert] + step * step
            state.context_squares[layer, back, other, expert] = squares
            state.context[layer, back, other, expert] -= CONTEXT_RATE * step / np.sqrt(squares + CONTEXT_SHIFT)


def _learn_far(state: ReuseState, layer: int, outcome: Any) -> None:
    slopes = [0.0] * len(DECAYS)
    logits = []
    for expert in range(len(outcome)):
        logit = state.far_bias[layer, expert]
        for kind in KINDS:
            logit = logit + state.far_weight[kind] * state.older[layer, kind, expert]
        logits.append(logit)
    for expert, logit in enumerate(logits):
        error = chance(logit) - outcome[expert]
        state.far_bias[layer, expert] -= FAR_BIAS_RATE * error
        for kind in KINDS:
            slopes[kind] += float(error * state.older[layer, kind, expert])
    for kind in KINDS:
        slopes[kind] /= len(outcome)
        squares = np.float32(float(state.far_weight_squares[kind]) + slopes[kind] * slopes[kind])
        state.far_weight_squares[kind] = squares
        step = FAR_RATE * slopes[kind] / math.sqrt(float(squares) + WEIGHT_SHIFT)
        state.far_weight[kind] = float(state.far_weight[kind]) - step


def _note_run(matching: Matching, clock: int, chosen: list[int], *, crowded: bool) -> None:
    layers = len(matching.past) // HISTORY_STEPS
    words = [0] * matching.past.shape[1]
    for expert in chosen:
        words[expert // WORD_BITS] += 2 ** (expert % WORD_BITS)
    matching.past[clock % len(matching.past)] = words
    if clock % layers != 0:
        return
    key = 0
    for word in words:
        key = (key * KEY_FACTOR + word) % KEY_PRIME
    step = clock // layers
    matching.keys[step % HISTORY_STEPS] = -1 - step if crowded else key
    lengths = {back: _alike(matching, step, back) for back in range(1, min(step, SEARCH_STEPS) + 1)}
    best = max(lengths, key=lambda back: (lengths[back], -back), default=0)
    length = lengths.get(best, 0)
    matching.back[step % HISTORY_STEPS] = best if length else 0
    matching.length[step % HISTORY_STEPS] = sum(length >= least for least in (2, 3, 4, 8, 16, 32))


def _alike(matching: Matching, step: int, back: int) -> int:
    """How many steps up to this one are as those `back` steps before them."""
    length = 0
    while length < LONGEST and step - back - length >= 0:
        mine, theirs = (matching.keys[(number - length) % HISTORY_STEPS] for number in (step, step - back))
        if mine != theirs:
            break
        length += 1
    return length


def _match(matching: Matching, clock: int) -> tuple[int, int]:
    """(layers back, class of length) of what number `clock` is like; 0 back: nothing."""
    layers = len(matching.past) // HISTORY_STEPS
    step = clock // layers % HISTORY_STEPS
    return int(matching.back[step]) * layers, int(matching.length[step])


def _used(matching: Matching, run: int, expert: int) -> bool:
    return bool(int(matching.past[run % len(matching.past), expert // WORD_BITS]) >> (expert % WORD_BITS) & 1)


def _guess_next(matching: Matching, clock: int, distance: int, expert: int) -> tuple[int, Any] | None:
    back, length = _match(matching, clock)
    return (length, np.float32(_used(matching, clock + distance - back, expert))) if back else None


def _guess_later(matching: Matching, clock: int, expert: int) -> tuple[int, Any] | None:
    back, length = _match(matching, clock)
    layers = len(matching.past) // HISTORY_STEPS
    runs = {ahead: clock - back + ahead * layers for ahead in range(2, LATER_STEPS + 1)}
    waits = [ahead for ahead, run in runs.items() if run <= clock and _used(matching, run, expert)]
    worth = np.float32(LATER_WORTH ** (waits[0] - 2)) if waits else np.float32(0.0)
    return (length, worth) if back else None


def _with_guess(matching: Matching, row: int, guess: tuple[int, Any] | None, logit: Any) -> Any:
    if guess is None:
        return logit
    length, worth = guess
    weight, base = matching.weight[row, length]
    return logit + (base + weight * worth)


def _learn_guess(matching: Matching, row: int, guesses: list[Any], error: Any) -> None:
    if guesses[0] is None:
        return
    length = guesses[0][0]
    for part, values in enumerate(([guess[1] for guess in guesses], [np.float32(1.0)] * len(guesses))):
        slope = sum(float(mine * value) for mine, value in zip(error, values, strict=True)) / len(guesses)
        squares = np.float32(float(matching.squares[row, length, part]) + slope * slope)
        matching.squares[row, length, part] = squares
        step = MATCH_RATE * slope / math.sqrt(float(squares) + MATCH_SHIFT)
        matching.weight[row, length, part] = float(matching.weight[row, length, part]) - step
