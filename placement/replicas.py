"""Spare slots: which experts a unit should have a copy of, beyond the one that every expert has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY


def slots_of_parts(part: NDArray[np.int64], experts: NDArray[np.int32], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    """part [n] of experts [n] -> slots [U, C], -1 where free; C is the largest of sizes [U]."""
    slots = np.full((len(sizes), int(sizes.max())), EMPTY, np.int32)
    for unit in range(len(sizes)):
        inside = experts[part == unit]
        slots[unit, : len(inside)] = inside
    return slots


def fill_spare(
    slots: NDArray[np.int32],
    sizes: NDArray[np.int64],
    load: NDArray[np.float64],
    coactivation: NDArray[np.float64],
    demand: NDArray[np.float64],
) -> NDArray[np.int32]:
    """Fill each unit's free slots, best expert first: what its own tokens would otherwise leave it for.

    load [E]; coactivation [E, E]; demand [U, E] of tokens that are at home at a unit. An expert's worth to a unit is
    its demand there plus its co-activation with what the unit has, divided by the copies that it has already, so that
    the hottest experts are not the only ones copied. A unit that holds every expert keeps empty slots.
    """
    filled = slots.copy()
    copies = np.bincount(filled[filled != EMPTY], minlength=len(load)).astype(np.float64)
    copies[copies == 0] = np.inf
    held = np.stack([np.isin(np.arange(len(load)), row) for row in filled])
    ties = held @ coactivation
    for column in range(filled.shape[1]):
        for unit in range(len(sizes)):
            if column >= sizes[unit] or filled[unit, column] != EMPTY:
                continue
            worth = (demand[unit] + ties[unit] + load * 1e-3 + 1e-9) / copies
            worth[held[unit] | np.isinf(copies)] = -1.0
            expert = int(np.argmax(worth))
            if worth[expert] < 0:
                break
            filled[unit, column] = expert
            held[unit, expert] = True
            copies[expert] += 1
            ties[unit] += coactivation[expert]
    return filled
