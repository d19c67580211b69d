"""The fast loop: keep the placement, re-draw a few replicas and trade a few places for the load of the moment."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.eplb import clean_load
from placement.errors import ConfigError, TraceError


@nb.njit(cache=True, nogil=True, inline="always")
def _steep(value: Any) -> Any:
    """value^8: a sum of these is ruled by the heaviest rank, and still rewards levelling the others."""
    value *= value
    value *= value
    return value * value


@nb.njit(cache=True, nogil=True)
def _total(rows: Any, load: Any, copies: Any) -> Any:
    total = np.zeros(len(rows))
    for rank in range(len(rows)):
        for expert in rows[rank]:
            if expert >= 0:
                total[rank] += load[expert] / copies[expert]
    return total


@nb.njit(cache=True, nogil=True)
def _replaced(total: Any, ranks_of: Any, copies: Any, load: Any, hot: Any, rank: Any, cold: Any, after: Any) -> None:
    """after [R]: the ranks' loads once `hot` has replaced a copy of `cold` (-1: an empty row) on rank."""
    after[:] = total
    for i in range(copies[hot]):
        after[ranks_of[hot, i]] += load[hot] / (copies[hot] + 1) - load[hot] / copies[hot]
    after[rank] += load[hot] / (copies[hot] + 1)
    if cold >= 0:
        after[rank] -= load[cold] / copies[cold]
        for i in range(copies[cold]):
            if ranks_of[cold, i] != rank:
                after[ranks_of[cold, i]] += load[cold] / (copies[cold] - 1) - load[cold] / copies[cold]


@nb.njit(cache=True, nogil=True)
def _ranks_of(rows: Any, num_experts: Any) -> Any:
    copies = np.zeros(num_experts, np.int64)
    ranks_of = np.zeros((num_experts, len(rows)), np.int64)
    holds = np.zeros((len(rows), num_experts), np.bool_)
    for rank in range(len(rows)):
        for expert in rows[rank]:
            if expert >= 0:
                ranks_of[expert, copies[expert]] = rank
                copies[expert] += 1
                holds[rank, expert] = True
    return ranks_of, copies, holds


@nb.njit(cache=True, nogil=True)
def relevel_once(rows: Any, load: Any) -> Any:
    """Make the change that lowers the sum of eighth powers most per expert copied; rows [R, C] in place.

    Either a copy of an expert of the heaviest rank replaces a copy that another expert can spare (one copy), or the
    heaviest rank trades an expert with another rank (two). Returns the copies made, 0 where nothing helps.
    """
    ranks_of, copies, holds = _ranks_of(rows, len(load))
    total = _total(rows, load, copies)
    mean = total.mean()
    if mean <= 0:
        return 0
    top = np.argmax(total)
    now = 0.0
    for rank in range(len(rows)):
        now += _steep(total[rank] / mean)
    best, best_change = 1e-9, (-1, -1, -1)
    after = np.empty_like(total)
    for row in range(rows.shape[1]):
        hot = rows[top, row]
        if hot < 0:
            continue
        for rank in range(len(rows)):
            if rank == top or holds[rank, hot]:
                continue
            for other in range(rows.shape[1]):
                cold = rows[rank, other]
                shift = load[hot] / copies[hot] - (load[cold] / copies[cold] if cold >= 0 else 0.0)
                if cold >= 0 and not holds[top, cold] and shift > 0:
                    gain = _steep(total[top] / mean) + _steep(total[rank] / mean)
                    gain -= _steep((total[top] - shift) / mean) + _steep((total[rank] + shift) / mean)
                    if gain / 2 > best:
                        best, best_change = gain / 2, (row, rank, other)
                if cold < 0 or copies[cold] > 1:
                    _replaced(total, ranks_of, copies, load, hot, rank, cold, after)
                    gain = now
                    for r in range(len(rows)):
                        gain -= _steep(after[r] / mean)
                    if gain > best:
                        best, best_change = gain, (-1 - row, rank, other)
    row, rank, other = best_change
    if rank < 0:
        return 0
    if row >= 0:
        rows[top, row], rows[rank, other] = rows[rank, other], rows[top, row]
        return 2
    rows[rank, other] = rows[top, -1 - row]
    return 1


@nb.njit(cache=True, nogil=True)
def _relevel(table: Any, load: Any, most_copies: Any, enough: Any) -> Any:
    """Rounds over the layers [L, R, C], one change each, until all are level enough or the copies are spent."""
    num_layers = len(table)
    left, done = most_copies, np.zeros(num_layers, np.bool_)
    while left > 0 and not done.all():
        for layer in range(num_layers):
            if done[layer] or left <= 0:
                continue
            _, copies, _ = _ranks_of(table[layer], load.shape[1])
            total = _total(table[layer], load[layer], copies)
            if total.max() <= enough * total.mean():
                done[layer] = True
                continue
            before = table[layer].copy()
            made = relevel_once(table[layer], load[layer])
            if made == 0 or made > left:
                table[layer] = before
                done[layer] = True
            else:
                left -= made
    return most_copies - left


def relevel(current: Placement, load: NDArray[np.float64], *, most_copies: int, enough: float = 1.005) -> Placement:
    """The current placement, levelled for load [L, E] with at most most_copies experts copied; epoch plus 1.

    Stops in a layer once the heaviest rank is within `enough` of the mean. A load that does not fit raises TraceError,
    a negative budget ConfigError.
    """
    weight = clean_load(load)
    if weight.shape != (current.num_layers, current.num_experts):
        raise TraceError(
            f"the load is [{weight.shape[0]}, {weight.shape[1]}], but the placement has {current.num_layers} layers "
            f"x {current.num_experts} experts"
        )
    if most_copies < 0:
        raise ConfigError(f"the budget must be 0 copies or more, got {most_copies}")
    table = current.physical_to_logical.astype(np.int64).reshape(current.num_layers, current.num_ranks, -1)
    _relevel(table, weight, most_copies, enough)
    return Placement(
        epoch=current.epoch + 1,
        num_ranks=current.num_ranks,
        num_experts=current.num_experts,
        physical_to_logical=table.reshape(current.num_layers, -1).astype(np.int32),
        tiers=current.tiers,
    )
