"""The fast loop: keep the placement, re-draw shares, a few replicas and a few places for the load of the moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.eplb import clean_load
from placement.errors import ConfigError, TraceError
from placement.shares import level_weights


@nb.njit(cache=True, nogil=True, inline="always")
def _steep(value: Any) -> Any:
    """value^8: a sum of these is ruled by the heaviest rank, and still rewards levelling the others."""
    value *= value
    value *= value
    return value * value


@nb.njit(cache=True, nogil=True)
def _holders(rows: Any, weights: Any, num_experts: Any) -> Any:
    """Of rows [R, C]: the ranks of each expert [E, R], how many [E], holds [R, E], and the sum of their weights [E]."""
    copies, weight = np.zeros(num_experts, np.int64), np.zeros(num_experts)
    ranks_of = np.zeros((num_experts, len(rows)), np.int64)
    holds = np.zeros((len(rows), num_experts), np.bool_)
    for rank in range(len(rows)):
        for expert in rows[rank]:
            if expert >= 0:
                ranks_of[expert, copies[expert]] = rank
                copies[expert] += 1
                weight[expert] += weights[rank]
                holds[rank, expert] = True
    return ranks_of, copies, holds, weight


@nb.njit(cache=True, nogil=True)
def _total(rows: Any, load: Any, weights: Any, weight: Any) -> Any:
    """The load [R] of each rank, an expert's being shared by its holders' weights."""
    total = np.zeros(len(rows))
    for rank in range(len(rows)):
        for expert in rows[rank]:
            if expert >= 0:
                total[rank] += load[expert] * weights[rank] / weight[expert]
    return total


@nb.njit(cache=True, nogil=True)
def _shift(total: Any, ranks: Any, weights: Any, weight: Any, load: Any, leaves: Any, joins: Any) -> None:
    """total [R] after one expert's copy leaves a rank and one joins another (-1: none); ranks: its holders so far."""
    new_weight = weight
    if leaves >= 0:
        new_weight -= weights[leaves]
        total[leaves] -= load * weights[leaves] / weight
    if joins >= 0:
        new_weight += weights[joins]
        total[joins] += load * weights[joins] / new_weight
    for rank in ranks:
        if rank != leaves:
            total[rank] += load * weights[rank] * (1 / new_weight - 1 / weight)


@nb.njit(cache=True, nogil=True)
def relevel_once(rows: Any, sizes: Any, load: Any, weights: Any) -> Any:
    """Make the change that lowers the sum of eighth powers most per expert copied; rows [R, C] in place.

    sizes [R]: the rows that each rank really has.

    Either a copy of an expert of the heaviest rank replaces a copy that another expert can spare (one copy), or the
    heaviest rank trades an expert with another rank (two). Returns the copies made, 0 where nothing helps.
    """
    ranks_of, copies, holds, weight = _holders(rows, weights, len(load))
    total = _total(rows, load, weights, weight)
    mean = total.mean()
    if mean <= 0:
        return 0
    top = np.argmax(total)
    now = 0.0
    for rank in range(len(rows)):
        now += _steep(total[rank] / mean)
    best, best_change = 1e-9, (-1, -1, -1, False)
    after = np.empty_like(total)
    for row in range(rows.shape[1]):
        hot = rows[top, row]
        if hot < 0:
            continue
        for rank in range(len(rows)):
            if rank == top or holds[rank, hot]:
                continue
            for other in range(sizes[rank]):
                cold = rows[rank, other]
                for trade in (False, True):
                    if trade and (cold < 0 or holds[top, cold]):
                        continue
                    if not trade and cold >= 0 and copies[cold] == 1:
                        continue
                    after[:] = total
                    _shift(
                        after,
                        ranks_of[hot, : copies[hot]],
                        weights,
                        weight[hot],
                        load[hot],
                        top if trade else -1,
                        rank,
                    )
                    if cold >= 0:
                        _shift(
                            after,
                            ranks_of[cold, : copies[cold]],
                            weights,
                            weight[cold],
                            load[cold],
                            rank,
                            top if trade else -1,
                        )
                    gain = now
                    for r in range(len(rows)):
                        gain -= _steep(after[r] / mean)
                    gain /= 2 if trade else 1
                    if gain > best:
                        best, best_change = gain, (row, rank, other, trade)
    row, rank, other, trade = best_change
    if rank < 0:
        return 0
    if trade:
        rows[top, row], rows[rank, other] = rows[rank, other], rows[top, row]
        return 2
    rows[rank, other] = rows[top, row]
    return 1


@nb.njit(cache=True, nogil=True)
def _relevel(table: Any, sizes: Any, load: Any, weights: Any, most_copies: Any, enough: Any) -> Any:
    """Rounds over the layers [L, R, C], one change each, until all are level enough or the copies are spent."""
    num_layers = len(table)
    left, done = most_copies, np.zeros(num_layers, np.bool_)
    for layer in range(num_layers):
        level_weights(table[layer], load[layer], weights[layer])
    while not done.all():
        for layer in range(num_layers):
            if done[layer]:
                continue
            _, _, _, weight = _holders(table[layer], weights[layer], load.shape[1])
            total = _total(table[layer], load[layer], weights[layer], weight)
            done[layer] = left <= 0 or total.max() <= enough * total.mean()
            if done[layer]:
                continue
            before = table[layer].copy()
            made = relevel_once(table[layer], sizes, load[layer], weights[layer])
            if made == 0 or made > left:
                table[layer] = before
                done[layer] = True
            else:
                left -= made
                level_weights(table[layer], load[layer], weights[layer])
    return most_copies - left


def relevel(
    current: Placement,
    load: NDArray[np.float64],
    *,
    most_copies: int,
    rows_of_rank: NDArray[np.int64] | None = None,
    enough: float = 1.005,
) -> Placement:
    """The current placement, levelled for load [L, E] with at most most_copies experts copied; epoch plus 1.

    rows_of_rank [R], where ranks have fewer slots than the table has rows. Shares are drawn anew first and after each
    copy, for that costs nothing. Stops in a layer once the heaviest rank is within `enough` of the mean. A load that
    does not fit raises TraceError, a negative budget ConfigError.
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
    weights = current.rank_weights.copy()
    sizes = np.full(current.num_ranks, table.shape[2], np.int64) if rows_of_rank is None else rows_of_rank
    _relevel(table, sizes, weight, weights, most_copies, enough)
    return replace(
        current,
        epoch=current.epoch + 1,
        physical_to_logical=table.reshape(current.num_layers, -1).astype(np.int32),
        rank_weights=weights,
    )
