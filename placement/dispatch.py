"""The replica choice: which rank serves each (token, expert). The worker and the planner's evaluation run this code.

A token visits as few other nodes than its home's as will do, and within the visited nodes as few other ranks than its
home as will do. Where it comes by several holders of an expert anyway, its home among them, any of them is as near: one
is drawn, by the ranks' weights. The draw is a hash of the token's home and experts, so every process that sees the same
token decides alike.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

NOWHERE = -1


@nb.njit(cache=True, nogil=True, inline="always")
def mix(value: Any) -> Any:
    """The 64-bit finaliser of splitmix64: a hash of one word."""
    word = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@nb.njit(cache=True, nogil=True)
def holders_of(holds: Any) -> Any:
    """holds [R, E] of one layer -> the ranks of each expert [E, X], ascending, padded with -1, and their number [E]."""
    num_ranks, num_experts = holds.shape
    count = np.zeros(num_experts, np.int32)
    for rank in range(num_ranks):
        for expert in range(num_experts):
            count[expert] += holds[rank, expert] != 0
    table = np.full((num_experts, max(1, count.max())), NOWHERE, np.int32)
    count[:] = 0
    for rank in range(num_ranks):
        for expert in range(num_experts):
            if holds[rank, expert]:
                table[expert, count[expert]] = rank
                count[expert] += 1
    return table, count


@nb.njit(cache=True, nogil=True)
def _serves(expert: Any, unit: Any, table: Any, count: Any, unit_of_rank: Any) -> Any:
    found = False
    for i in range(count[expert]):
        found = found or unit_of_rank[table[expert, i]] == unit
    return found


@nb.njit(cache=True, nogil=True)
def _best_unit(chosen: Any, needs: Any, table: Any, count: Any, unit_of_rank: Any, seed: Any) -> Any:
    """The unit (node or rank) that holds most of the experts still needed; equals by hash."""
    best, best_score = -1, np.uint64(0)
    for k in range(len(chosen)):
        if not needs[k]:
            continue
        for i in range(count[chosen[k]]):
            unit = unit_of_rank[table[chosen[k], i]]
            if unit < 0:
                continue
            served = 0
            for other in range(len(chosen)):
                served += needs[other] and _serves(chosen[other], unit, table, count, unit_of_rank)
            score = (np.uint64(served) << np.uint64(48)) | (mix(seed ^ np.uint64(unit)) >> np.uint64(16))
            if best < 0 or score > best_score:
                best, best_score = unit, score
    return best


@nb.njit(cache=True, nogil=True)
def _covering_pair(chosen: Any, needs: Any, table: Any, count: Any, node_of_rank: Any, seed: Any) -> Any:
    """Two nodes that hold all the needed experts, or (-1, -1). One of the two must hold the first of them."""
    first = 0
    while not needs[first]:
        first += 1
    num_first = count[chosen[first]]
    start = np.int64(seed % np.uint64(num_first))
    for i in range(num_first):
        one = node_of_rank[table[chosen[first], (start + i) % num_first]]
        second = first + 1
        while second < len(chosen) and (not needs[second] or _serves(chosen[second], one, table, count, node_of_rank)):
            second += 1
        if second == len(chosen):
            return one, one
        for j in range(count[chosen[second]]):
            two = node_of_rank[table[chosen[second], j]]
            rest = second + 1
            while rest < len(chosen) and (
                not needs[rest]
                or _serves(chosen[rest], one, table, count, node_of_rank)
                or _serves(chosen[rest], two, table, count, node_of_rank)
            ):
                rest += 1
            if rest == len(chosen):
                return one, two
    return -1, -1


@nb.njit(cache=True, nogil=True)
def _open_nodes(
    chosen: Any, needs: Any, table: Any, count: Any, node_of_rank: Any, seed: Any, mark: Any, stamp: Any
) -> Any:
    """Mark the nodes to visit for the needed experts: greedy, and a pair where greedy would take three or more."""
    before = needs.copy()
    opened = np.empty(len(chosen), np.int64)
    num_opened = 0
    while needs.any():
        node = _best_unit(chosen, needs, table, count, node_of_rank, seed)
        opened[num_opened] = node
        num_opened += 1
        for k in range(len(chosen)):
            if needs[k] and _serves(chosen[k], node, table, count, node_of_rank):
                needs[k] = False
    if num_opened >= 3:
        one, two = _covering_pair(chosen, before, table, count, node_of_rank, seed)
        if one >= 0:
            mark[one] = stamp
            mark[two] = stamp
            return
    for i in range(num_opened):
        mark[opened[i]] = stamp


@nb.njit(cache=True, nogil=True)
def serve_token(
    chosen: Any,
    home: Any,
    holds: Any,
    table: Any,
    count: Any,
    node_of_rank: Any,
    mark: Any,
    stamp: Any,
    needs: Any,
    out: Any,
) -> None:
    """Write to out [K] the rank that serves each chosen expert [K] of one token.

    holds [R, E]: 0, or the rank's weight; table, count: from `holders_of`. mark [R + N] int64 scratch in which nothing
    equals stamp yet; needs [K] bool scratch.
    """
    num_ranks = len(node_of_rank)
    node_mark = mark[num_ranks:]
    node_mark[node_of_rank[home]] = stamp
    mark[home] = stamp
    undecided = 0
    seed = np.uint64(home)
    for k in range(len(chosen)):
        expert = chosen[k]
        out[k] = NOWHERE
        needs[k] = False
        if expert < 0:
            continue
        seed = mix(seed ^ np.uint64(expert))
        if count[expert] == 1:
            out[k] = table[expert, 0]
            mark[out[k]] = stamp
            node_mark[node_of_rank[out[k]]] = stamp
        else:
            undecided += 1
    if undecided:
        _serve_replicated(chosen, holds, table, count, node_of_rank, mark, stamp, needs, out, seed)


@nb.njit(cache=True, nogil=True)
def _serve_replicated(
    chosen: Any,
    holds: Any,
    table: Any,
    count: Any,
    node_of_rank: Any,
    mark: Any,
    stamp: Any,
    needs: Any,
    out: Any,
    seed: Any,
) -> None:
    """The experts of a token that lie on several ranks; those with one holder are decided and marked already."""
    node_mark = mark[len(node_of_rank) :]
    any_needs = False
    for k in range(len(chosen)):
        expert = chosen[k]
        if expert < 0 or out[k] != NOWHERE:
            continue
        first = node_of_rank[table[expert, 0]]
        single = True
        for i in range(count[expert]):
            single = single and node_of_rank[table[expert, i]] == first
        if single:
            node_mark[first] = stamp
    for k in range(len(chosen)):
        if chosen[k] >= 0 and out[k] == NOWHERE:
            needs[k] = True
            for i in range(count[chosen[k]]):
                needs[k] = needs[k] and node_mark[node_of_rank[table[chosen[k], i]]] != stamp
            any_needs = any_needs or needs[k]
    if any_needs:
        _open_nodes(chosen, needs, table, count, node_of_rank, seed, node_mark, stamp)
    for k in range(len(chosen)):
        if chosen[k] >= 0 and out[k] == NOWHERE:
            out[k] = _near_rank(chosen, k, holds, table, count, node_of_rank, mark, stamp, out, seed)
            mark[out[k]] = stamp


@nb.njit(cache=True, nogil=True)
def _worth(
    chosen: Any, k: Any, rank: Any, table: Any, count: Any, node_of_rank: Any, mark: Any, stamp: Any, out: Any
) -> Any:
    """How good a holder of chosen[k] is: -1 on a node not visited, K if visited anyway, else what more it serves."""
    if mark[len(node_of_rank) + node_of_rank[rank]] != stamp:
        return -1
    if mark[rank] == stamp:
        return len(chosen)
    more = 0
    for other in range(k + 1, len(chosen)):
        if chosen[other] >= 0 and out[other] == NOWHERE:
            for j in range(count[chosen[other]]):
                more += table[chosen[other], j] == rank
    return more


@nb.njit(cache=True, nogil=True)
def _near_rank(
    chosen: Any,
    k: Any,
    holds: Any,
    table: Any,
    count: Any,
    node_of_rank: Any,
    mark: Any,
    stamp: Any,
    out: Any,
    seed: Any,
) -> Any:
    """Among the best holders of chosen[k], one drawn by weight."""
    expert = chosen[k]
    most, total = -1, np.int64(0)
    for i in range(count[expert]):
        rank = table[expert, i]
        worth = _worth(chosen, k, rank, table, count, node_of_rank, mark, stamp, out)
        if worth > most:
            most, total = worth, np.int64(0)
        if worth == most:
            total += holds[rank, expert]
    draw = np.int64(mix(seed ^ np.uint64(expert)) % np.uint64(total))
    for i in range(count[expert]):
        rank = table[expert, i]
        if _worth(chosen, k, rank, table, count, node_of_rank, mark, stamp, out) == most:
            draw -= holds[rank, expert]
            if draw < 0:
                return rank
    return NOWHERE


@nb.njit(cache=True, nogil=True)
def _choose(experts: Any, home: Any, holds: Any, node_of_rank: Any) -> Any:
    table, count = holders_of(holds)
    num_tokens, top_k = experts.shape
    ranks = np.empty((num_tokens, top_k), np.int32)
    mark = np.full(len(node_of_rank) + node_of_rank.max() + 1, -1, np.int64)
    needs = np.zeros(top_k, np.bool_)
    for token in range(num_tokens):
        serve_token(experts[token], home[token], holds, table, count, node_of_rank, mark, token, needs, ranks[token])
    return ranks


def choose_ranks(
    experts: NDArray[Any],
    home: NDArray[np.int32],
    holds: NDArray[np.unsignedinteger[Any]],
    node_of_rank: NDArray[np.int32],
) -> NDArray[np.int32]:
    """The rank that serves each (token, expert): fewest nodes beside home's, then fewest ranks, then drawn by weight.

    experts [T, K] logical ids of one layer, -1 for none; home [T]; holds [R, E] of that layer, a rank's weight where it
    has an expert, else 0; node_of_rank [R]. Returns int32 [T, K], -1 where experts is -1. Every expert named must have
    a holder.
    """
    ranks: NDArray[np.int32] = _choose(
        np.ascontiguousarray(experts, np.int32),
        np.ascontiguousarray(home, np.int32),
        np.ascontiguousarray(holds, np.uint16),
        np.ascontiguousarray(node_of_rank, np.int32),
    )
    return ranks
