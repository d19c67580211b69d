"""What came after, when this came before: text repeats itself, and its routing with it.

As in compressors that match (PAQ's match model; Mahoney, 2005): the steps whose first layer chose the same experts as
the last ones did, going back as far as they are the same, and of equal ones the latest. What ran after that step is a
guess at what runs now: the layers of this step that are still to come, the next step, and those after it. How much such
a guess is worth is learned, apart for each distance and length of the match.

Where a layer chose more experts than two tokens do, several requests are mixed, and nothing is matched.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

HISTORY_STEPS, SEARCH_STEPS, LONGEST = 4096, 4000, 32
NUM_LENGTHS = 7
WORD_BITS = 32
MATCH_RATE, MATCH_SHIFT = 0.1, 1e-4
LATER = 0
KEY_FACTOR, KEY_PRIME = 1000003, (1 << 31) - 1


class Matching(NamedTuple):
    """H steps. past [H * L, W] the experts that the last runs used, a bit each; keys [H] what the first layer chose,
    hashed (below 0: nothing to be matched); back [H] how many steps before a step its match lies (0: there is none) and
    length [H] the class of its length; weight, squares [L + 1, NUM_LENGTHS, 2] of the guess and of there being one, row
    LATER for the wait after the next step, row d for d layers ahead.
    """

    past: NDArray[Any]
    keys: NDArray[Any]
    back: NDArray[Any]
    length: NDArray[Any]
    weight: NDArray[Any]
    squares: NDArray[Any]


@njit(cache=True)
def words_of(num_experts: int) -> int:
    """How many words hold a bit for each expert."""
    return (num_experts + WORD_BITS - 1) // WORD_BITS


@njit(cache=True)
def note_run(matching: Matching, clock: int, experts: NDArray[Any], crowded: bool) -> None:
    """Run number `clock` used these experts. If it was a step's first: find what the step is like."""
    past, keys = matching.past, matching.keys
    used = past[clock % len(past)]
    used[:] = 0
    for expert in experts:
        used[expert // WORD_BITS] |= 1 << (expert % WORD_BITS)
    num_layers = len(past) // len(keys)
    if clock % num_layers:
        return
    step = clock // num_layers
    key = 0
    for word in used:
        key = (key * KEY_FACTOR + word) % KEY_PRIME
    keys[step % HISTORY_STEPS] = -1 - step if crowded else key
    back, length = _longest_match(keys, step)
    matching.back[step % HISTORY_STEPS] = back
    matching.length[step % HISTORY_STEPS] = class_of(length)


@njit(cache=True)
def _longest_match(keys: NDArray[Any], step: int) -> tuple[int, int]:
    best = longest = 0
    key = keys[step % HISTORY_STEPS]
    for back in range(1, min(step, SEARCH_STEPS) + 1):
        if keys[(step - back) % HISTORY_STEPS] != key:
            continue
        length = 1
        while length < min(LONGEST, step - back + 1):
            if keys[(step - back - length) % HISTORY_STEPS] != keys[(step - length) % HISTORY_STEPS]:
                break
            length += 1
        if length > longest:
            best, longest = back, length
        if longest == LONGEST:
            break
    return best, longest


@njit(cache=True)
def class_of(length: int) -> int:
    """1, 2, 3, 4 to 7, 8 to 15, 16 to 31, 32 steps."""
    kind = max(length - 1, 0)
    if length > 3:
        kind = 2
        while length > 3:
            kind += 1
            length //= 2
    return kind


@njit(cache=True)
def guess_next(matching: Matching, clock: int, distance: int, guess: NDArray[Any]) -> int:
    """What runs `distance` layers after number `clock`: 1 for experts that the match used then, 0 for others, written
    to guess [E]. Returns the class of the match, -1 if there is none.
    """
    num_layers = len(matching.weight) - 1
    step = clock // num_layers % HISTORY_STEPS
    if matching.back[step] == 0:
        return -1
    guess[:] = 0.0
    run = clock + distance - matching.back[step] * num_layers
    _mark(matching, run, np.float32(1.0), guess)
    return int(matching.length[step])


@njit(cache=True)
def guess_later(matching: Matching, clock: int, worths: NDArray[Any], guess: NDArray[Any]) -> int:
    """The wait beyond the next step of the layer that ran as number `clock`: worths [n] of a use after so many steps,
    as far as the match goes, written to guess [E]. Returns as `guess_next`.
    """
    num_layers = len(matching.weight) - 1
    step = clock // num_layers % HISTORY_STEPS
    if matching.back[step] == 0:
        return -1
    guess[:] = 0.0
    for ahead in range(min(len(worths) - 1, matching.back[step]), 1, -1):
        _mark(matching, clock + (ahead - matching.back[step]) * num_layers, worths[ahead], guess)
    return int(matching.length[step])


@njit(cache=True)
def _mark(matching: Matching, run: int, worth: np.float32, guess: NDArray[Any]) -> None:
    used = matching.past[run % len(matching.past)]
    for expert in range(len(guess)):
        if (used[expert // WORD_BITS] >> (expert % WORD_BITS)) & 1:
            guess[expert] = worth


@njit(cache=True)
def add_guess(matching: Matching, row: int, length: int, guess: NDArray[Any], logits: NDArray[Any]) -> None:
    """Add to logits [E] what a guess [E] says for a row and a class of length."""
    weight, base = matching.weight[row, length, 0], matching.weight[row, length, 1]
    for expert in range(len(logits)):
        logits[expert] += base + weight * guess[expert]


@njit(cache=True)
def learn_guess(matching: Matching, row: int, length: int, guess: NDArray[Any], error: NDArray[Any]) -> None:
    """AdaGrad on the weights that `add_guess` used."""
    slopes = (mean_product(error, guess), mean_product(error, np.ones_like(guess)))
    for part in range(2):
        matching.squares[row, length, part] += slopes[part] * slopes[part]
        spread = math.sqrt(np.float64(matching.squares[row, length, part]) + MATCH_SHIFT)
        matching.weight[row, length, part] -= MATCH_RATE * slopes[part] / spread


@njit(cache=True)
def mean_product(error: NDArray[Any], guess: NDArray[Any]) -> float:
    total = 0.0
    for expert in range(len(error)):
        total += np.float64(error[expert] * guess[expert])
    return total / len(error)
