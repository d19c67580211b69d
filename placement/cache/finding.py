"""The lookup of a layer: which experts does it need, and which of them lie in slots?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

NEEDED, HITS, MISSING = range(3)


@njit(cache=True)
def find(
    slot_at: NDArray[Any],
    held: NDArray[Any],
    stirring: NDArray[Any],
    layer: int,
    chosen: NDArray[Any],
    found: NDArray[Any],
) -> tuple[int, int, int]:
    """Find a layer's distinct experts, and hold the slots of those that are there.

    slot_at [L, E + 1] (-1: in no slot; the last column stays -1, for the expert -1); held, stirring [S]: slots in use,
    and slots with which something is still to be done; chosen [n]: ids, -1 for one that is not here. found [3, E + 1]:
    the needed, the hits, the missing, each in ascending order. Returns how many are needed, how many are hits, and how
    many of these are stirring.
    """
    marks = found[HITS]
    marks[:] = 0
    for expert in chosen:
        marks[expert] = 1
    needed = hits = missing = unsettled = 0
    for expert in range(slot_at.shape[1] - 1):
        if marks[expert] == 0:
            continue
        found[NEEDED, needed] = expert
        needed += 1
        slot = slot_at[layer, expert]
        if slot < 0:
            found[MISSING, missing] = expert
            missing += 1
        else:
            # Behind the marks that are still to be read, since there are no more hits than experts seen.
            found[HITS, hits] = expert
            hits += 1
            held[slot] = True
            unsettled += stirring[slot]
    return needed, hits, unsettled


@njit(cache=True)
def by_count(ids: NDArray[Any], num_experts: int) -> NDArray[Any]:
    """The distinct ids [n] (-1: none), those that come most often first, of equal ones the least."""
    counts = np.zeros(num_experts + 1, np.int64)
    for expert in ids:
        counts[expert] += 1
    counts[num_experts] = 0
    order = np.argsort(-counts, kind="mergesort")
    return order[: np.count_nonzero(counts)]
