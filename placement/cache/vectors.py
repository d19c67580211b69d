"""The logistic function and logarithms of whole arrays, in float32 and without calls, so that eight are computed at
once: of all that a policy does, calls of exp and log took the longest.

Polynomials as in Cephes (Moshier, 1989), right to some 2e-7 of the result; the same bits on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

MANTISSA_BITS, EXPONENT_BIAS = 23, 127
LARGEST_POWER = np.float32(126.0)
PER_LN2, HALF, ONE = np.float32(1.44269504), np.float32(0.5), np.float32(1.0)
# 2 ** x for x from -0.5 to 0.5: ln(2) ** n / n!, the last first.
POWER = tuple(np.float32(each) for each in (1.535336e-4, 1.339887e-3, 9.618437e-3, 5.550333e-2, 0.24022648, 0.69314720))
# (log(1 + x) - x + x * x / 2) / x ** 3 for 1 + x from sqrt(1/2) to sqrt(2), the last first.
LOG = tuple(
    np.float32(each)
    for each in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
ROOT_OF_HALF_BITS = 0x3F3504F3
LN2 = np.float32(0.69314718)


@njit(cache=True)
def add_rows(rows: NDArray[Any], which: NDArray[Any], scale: np.float32, sums: NDArray[Any]) -> None:
    """Add scale times each of these rows [R, n] to sums [n], in their order: four at a time, since to find a row takes
    as long as to add it."""
    fours = len(which) // 4 * 4
    for index in range(0, fours, 4):
        first, second, third, fourth = which[index], which[index + 1], which[index + 2], which[index + 3]
        for place in range(len(sums)):
            total = sums[place] + scale * rows[first, place] + scale * rows[second, place]
            sums[place] = total + scale * rows[third, place] + scale * rows[fourth, place]
    for index in range(fours, len(which)):
        row = which[index]
        for place in range(len(sums)):
            sums[place] += scale * rows[row, place]


@njit(cache=True, error_model="numpy")
def learn_row(
    row: NDArray[Any],
    squares: NDArray[Any],
    scale: np.float32,
    error: NDArray[Any],
    rate: np.float32,
    shift: np.float32,
) -> None:
    """AdaGrad on a row [n] that was added with this scale."""
    for place in range(len(error)):
        step = scale * error[place]
        squares[place] += step * step
        row[place] -= rate * step / np.sqrt(squares[place] + shift)


@njit(cache=True, error_model="numpy")
def to_chances(logits: NDArray[Any]) -> None:
    """1 / (1 + exp(-x)) for each x of logits [n] float32, in its place."""
    exponents = np.empty(len(logits), np.int32)
    for index in range(len(logits)):
        power = min(max(-logits[index] * PER_LN2, -LARGEST_POWER), LARGEST_POWER)
        # Rounded to the nearest whole number: what is above 0 is cut off.
        exponent = np.int32(power + np.float32(EXPONENT_BIAS) + HALF)
        rest = power - np.float32(exponent - np.int32(EXPONENT_BIAS))
        value = POWER[0]
        for factor in POWER[1:]:
            value = value * rest + factor
        logits[index] = value * rest + ONE
        exponents[index] = exponent << MANTISSA_BITS
    scale = exponents.view(np.float32)
    for index in range(len(logits)):
        logits[index] = ONE / (ONE + logits[index] * scale[index])


@njit(cache=True)
def logs_of(values: NDArray[Any], logs: NDArray[Any]) -> None:
    """The natural logarithms of values [n] float32, none of them below 1e-37: written to logs."""
    bits = values.view(np.int32)
    rest_bits = np.empty(len(bits), np.int32)
    for index in range(len(bits)):
        exponent = (bits[index] - np.int32(ROOT_OF_HALF_BITS)) >> MANTISSA_BITS
        rest_bits[index] = bits[index] - np.int32(exponent << MANTISSA_BITS)
        logs[index] = np.float32(exponent)
    mantissas = rest_bits.view(np.float32)
    for index in range(len(bits)):
        rest = mantissas[index] - ONE
        square = rest * rest
        value = LOG[0]
        for factor in LOG[1:]:
            value = value * rest + factor
        logs[index] = value * rest * square - HALF * square + rest + logs[index] * LN2
