"""Spare slots: which experts a unit should have a copy of, beyond the one that every expert has."""

from __future__ import annotations

from typing import Any

import numba as nb
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


def fewest_copies(
    load: NDArray[np.float64], experts: NDArray[np.int32], spare: int, most: int, fair: float
) -> NDArray[np.int64]:
    """The copies [E] that each of the experts [n] must keep, so that none is more than a fair load for one rank.

    load [E]; one copy each and as many of the spare slots as that takes, the hottest first; no more than most of one.
    """
    copies = np.zeros(len(load), np.int64)
    copies[experts] = 1
    for _ in range(spare):
        per_copy = np.where((copies > 0) & (copies < most), load / np.maximum(copies, 1), 0.0)
        hottest = int(np.argmax(per_copy))
        if per_copy[hottest] <= fair:
            break
        copies[hottest] += 1
    return copies


def fill_spare(
    slots: NDArray[np.int32],
    sizes: NDArray[np.int64],
    load: NDArray[np.float64],
    coactivation: NDArray[np.float64],
    demand: NDArray[np.float64],
    fewest: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Fill each unit's free slots: first what must have several copies, then what its own tokens would leave it for.

    load [E]; coactivation [E, E]; demand [U, E] of tokens that are at home at a unit; fewest [E]: `fewest_copies`. An
    expert's worth to a unit is its demand there plus its co-activation with what the unit has, divided by the copies
    that it has already, so that the hottest experts are not the only ones copied. A unit that holds every expert keeps
    empty slots.
    """
    filled = slots.copy()
    _fill(filled, sizes, load, coactivation, demand, fewest)
    return filled


@nb.njit(cache=True, nogil=True)
def _fill(filled: Any, sizes: Any, load: Any, coactivation: Any, demand: Any, fewest: Any) -> None:
    num_units, num_experts = demand.shape
    copies = np.zeros(num_experts)
    held = np.zeros((num_units, num_experts), np.bool_)
    ties = np.zeros((num_units, num_experts))
    for unit in range(num_units):
        for expert in filled[unit]:
            if expert >= 0:
                copies[expert] += 1
                held[unit, expert] = True
                ties[unit] += coactivation[expert]
    used = np.zeros(num_units, np.int64)
    for unit in range(num_units):
        while used[unit] < sizes[unit] and filled[unit, used[unit]] >= 0:
            used[unit] += 1
    for expert in np.argsort(-load):
        while 0 < copies[expert] < fewest[expert]:
            best, most = -1, -1.0
            for unit in range(num_units):
                worth = demand[unit, expert] + ties[unit, expert]
                if used[unit] < sizes[unit] and not held[unit, expert] and worth > most:
                    best, most = unit, worth
            if best < 0:
                break
            filled[best, used[best]] = expert
            used[best] += 1
            held[best, expert] = True
            copies[expert] += 1
            ties[best] += coactivation[expert]
    for column in range(filled.shape[1]):
        for unit in range(num_units):
            if column >= sizes[unit] or filled[unit, column] >= 0:
                continue
            best, most = -1, -1.0
            for expert in range(num_experts):
                if copies[expert] > 0 and not held[unit, expert]:
                    worth = (demand[unit, expert] + ties[unit, expert] + load[expert] * 1e-3 + 1e-9) / copies[expert]
                    if worth > most:
                        best, most = expert, worth
            if best < 0:
                continue
            filled[unit, column] = best
            held[unit, best] = True
            copies[best] += 1
            ties[unit] += coactivation[best]
