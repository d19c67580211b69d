"""Load-only decisions, compiled: how many copies each expert gets, and which rank each copy goes to."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from placement.core import EMPTY


@nb.njit(cache=True, nogil=True)
def replicate(load: Any, num_slots: Any, most_copies: Any) -> Any:
    """The expert of each physical copy, int64 [P]: each expert once in order, then spare slots one by one.

    A spare slot goes to the highest load per copy; among equals to the one with fewest copies, then the lowest id, so
    zero load spreads evenly. No expert gets more than most_copies; slots that nobody may take stay -1. load [E].
    """
    num_experts = len(load)
    copies = np.ones(num_experts, np.int64)
    experts = np.full(num_slots, EMPTY, np.int64)
    experts[:num_experts] = np.arange(num_experts)
    for slot in range(num_experts, num_slots):
        best = -1
        for expert in range(num_experts):
            if copies[expert] >= most_copies:
                continue
            if best < 0:
                best = expert
                continue
            mine, theirs = load[expert] / copies[expert], load[best] / copies[best]
            if mine > theirs or (mine == theirs and copies[expert] < copies[best]):
                best = expert
        if best < 0:
            break
        experts[slot] = best
        copies[best] += 1
    return experts


@nb.njit(cache=True, nogil=True)
def _has(row: Any, expert: Any) -> Any:
    found = False
    for other in row:
        found = found or other == expert
    return found


@nb.njit(cache=True, nogil=True)
def _swap_in(rows: Any, fill: Any, total: Any, expert: Any, weight: Any, weight_of: Any) -> Any:
    """Put expert on a full pack that lacks it; what lay there moves to a pack with room. Whether that could be done."""
    for spare in range(len(rows)):
        if fill[spare] == rows.shape[1]:
            continue
        for pack in range(len(rows)):
            if pack == spare or _has(rows[pack, : fill[pack]], expert):
                continue
            for row in range(fill[pack]):
                moved = rows[pack, row]
                if not _has(rows[spare, : fill[spare]], moved):
                    rows[spare, fill[spare]] = moved
                    rows[pack, row] = expert
                    total[spare] += weight_of[moved]
                    total[pack] += weight - weight_of[moved]
                    fill[spare] += 1
                    return True
    return False


@nb.njit(cache=True, nogil=True)
def pack(experts: Any, weight_of: Any, num_packs: Any, rows_per_pack: Any) -> Any:
    """Rows int64 [packs, rows]: heaviest copy first, each into the lightest pack with room that lacks the expert.

    experts [P], -1 skipped; weight_of [E] load of one copy. Where every pack with room has the expert already, one of
    another pack changes places; where that cannot be, a slot stays -1. No expert is ever twice in a pack.
    """
    rows = np.full((num_packs, rows_per_pack), EMPTY, np.int64)
    fill, total = np.zeros(num_packs, np.int64), np.zeros(num_packs)
    weight = np.array([weight_of[expert] if expert >= 0 else -1.0 for expert in experts])
    for index in np.argsort(-weight, kind="mergesort"):
        expert = experts[index]
        if expert < 0:
            continue
        best = -1
        for candidate in range(num_packs):
            lighter = best < 0 or total[candidate] < total[best]
            if fill[candidate] < rows_per_pack and lighter and not _has(rows[candidate, : fill[candidate]], expert):
                best = candidate
        if best >= 0:
            rows[best, fill[best]] = expert
            fill[best] += 1
            total[best] += weight[index]
        else:
            _swap_in(rows, fill, total, expert, weight[index], weight_of)
    return rows


@nb.njit(cache=True, nogil=True)
def level(rows: Any, weight_of: Any, most_swaps: Any) -> None:
    """Swap experts between the heaviest pack and another while that lowers the heavier of the two; in place."""
    num_packs, width = rows.shape
    total = np.zeros(num_packs)
    for one in range(num_packs):
        for expert in rows[one]:
            total[one] += weight_of[expert] if expert >= 0 else 0.0
    for _ in range(most_swaps):
        top = np.argmax(total)
        best_peak, best_row, best_pack, best_other = total[top], -1, -1, -1
        for row in range(width):
            mine = rows[top, row]
            if mine < 0:
                continue
            for other_pack in range(num_packs):
                if other_pack == top or total[other_pack] >= best_peak or _has(rows[other_pack], mine):
                    continue
                for other in range(width):
                    theirs = rows[other_pack, other]
                    shift = weight_of[mine] - (weight_of[theirs] if theirs >= 0 else 0.0)
                    peak = max(total[top] - shift, total[other_pack] + shift)
                    if shift > 0 and peak < best_peak * (1 - 1e-9) and not (theirs >= 0 and _has(rows[top], theirs)):
                        best_peak, best_row, best_pack, best_other = peak, row, other_pack, other
        if best_row < 0:
            return
        mine, theirs = rows[top, best_row], rows[best_pack, best_other]
        shift = weight_of[mine] - (weight_of[theirs] if theirs >= 0 else 0.0)
        rows[top, best_row], rows[best_pack, best_other] = theirs, mine
        total[top] -= shift
        total[best_pack] += shift


@nb.njit(cache=True, nogil=True)
def copies_of(experts: Any, num_experts: Any) -> Any:
    """Copies int64 [E] among experts [P]."""
    copies = np.zeros(num_experts, np.int64)
    for expert in experts:
        if expert >= 0:
            copies[expert] += 1
    return copies
