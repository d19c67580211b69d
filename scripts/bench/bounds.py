"""Lower bounds on the other nodes visited, that no placement of these slots can beat on these very tokens.

Homes are uniform over nodes and independent of the token, as random homes are in the mean. Both bounds know the judged
tokens in advance, which no planner does, and ask nothing of balance; so the room that they show is more than there is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from placement.graph import build_graph
from placement.topology import Topology
from placement.trace import RoutingTrace

EIGEN_STEPS = 60
LP_TOKENS = 1000


def hops_bound(trace: RoutingTrace, topology: Topology, rows: int) -> float:
    """Mean over layers, in other nodes visited per token and layer. Nodes must be of one size."""
    num_nodes, num_slots = topology.num_nodes, topology.num_ranks * rows
    if num_slots == trace.num_experts:
        graph = build_graph(trace, transitions=False)
        layers = [_without_spares(pairs / trace.num_tokens, trace.top_k, num_nodes) for pairs in graph.coactivation]
    else:
        pick = np.random.default_rng(0).permutation(trace.num_tokens)[:LP_TOKENS]
        layers = [
            _with_spares(
                trace.experts[pick, layer].astype(np.int64), trace.num_experts, num_slots / num_nodes, num_nodes
            )
            for layer in range(trace.num_layers)
        ]
    return float(np.mean(layers))


def _without_spares(pairs: NDArray[np.float64], top_k: int, num_nodes: int) -> float:
    """pairs [E, E]: the chance that a token has both. Each node holds E / nodes experts, each expert lies once.

    Donath and Hoffman's eigenvalue bound, projected on the vectors that sum to 0 (Rendl and Wolkowicz), says how many
    pairs a token can find on one node at most; a token with so many pairs visits a convex function of them of nodes at
    least; by Jensen that holds for the means. The home is one of the nodes visited with a chance of visits / nodes.
    """
    together = min(_most_pairs_inside(pairs, num_nodes), top_k * (top_k - 1) / 2)
    return fewest_visits(together, top_k, num_nodes) * (1 - 1 / num_nodes)


def _most_pairs_inside(pairs: NDArray[np.float64], num_nodes: int) -> float:
    """At most so many of a token's pairs lie inside nodes. The diagonal is free but for its sum: subgradient steps."""
    num_experts = len(pairs)
    size = num_experts / num_nodes
    basis = np.linalg.qr(np.c_[np.ones(num_experts), np.eye(num_experts)[:, 1:]])[0][:, 1:]
    free = -pairs.sum(axis=1)
    free -= free.mean()
    scale, best = np.abs(free).mean() + 1e-9, np.inf
    for step in range(EIGEN_STEPS):
        matrix = pairs + np.diag(free)
        values, vectors = np.linalg.eigh(basis.T @ matrix @ basis)
        best = min(best, size / 2 * (matrix.sum() / num_experts + values[1 - num_nodes :].sum()))
        slope = ((basis @ vectors[:, 1 - num_nodes :]) ** 2).sum(axis=1)
        free -= scale / (1 + step) * num_experts * (slope - slope.mean())
    return float(best)


def fewest_visits(pairs_inside: float, top_k: int, num_nodes: int) -> float:
    """The lower convex hull, over all ways to split top_k experts on nodes, of nodes visited against pairs inside."""
    fewest: dict[int, int] = {}
    for parts in _partitions(top_k, num_nodes, top_k):
        inside = sum(part * (part - 1) // 2 for part in parts)
        fewest[inside] = min(fewest.get(inside, top_k), len(parts))
    points = sorted(fewest.items())
    values = [float(count) for pairs, count in points if pairs == pairs_inside]
    for index, (low, count_low) in enumerate(points):
        for high, count_high in points[index + 1 :]:
            if low <= pairs_inside <= high:
                values.append(count_low + (count_high - count_low) * (pairs_inside - low) / (high - low))
    return min(values, default=float(points[0][1]))


def _partitions(total: int, most_parts: int, largest: int) -> list[tuple[int, ...]]:
    if total == 0:
        return [()]
    if most_parts == 0:
        return []
    return [
        (part, *rest)
        for part in range(min(total, largest), 0, -1)
        for rest in _partitions(total - part, most_parts - 1, part)
    ]


def _with_spares(chosen: NDArray[np.int64], num_experts: int, slots_per_node: float, num_nodes: int) -> float:
    """chosen [S, K]. A token stays at home only where home's node holds all of its experts; else it visits one or more.

    A linear program (HiGHS) over the share of the nodes that hold each expert: a token is at home on at most the
    smallest share among its experts, and the shares sum to the slots of one node. The optimum on a sample is above the
    one on all tokens in the mean, which keeps the bound a bound.
    """
    num_tokens, top_k = chosen.shape
    row = np.arange(num_tokens * top_k)
    token = np.repeat(np.arange(num_tokens), top_k)
    ones = np.ones(len(row))
    below = coo_array(
        (np.r_[ones, -ones], (np.r_[row, row], np.r_[token, num_tokens + chosen.ravel()])),
        shape=(len(row), num_tokens + num_experts),
    )
    total = coo_array(
        (np.ones(num_experts), (np.zeros(num_experts, int), num_tokens + np.arange(num_experts))),
        shape=(1, num_tokens + num_experts),
    )
    solved: Any = linprog(
        np.r_[np.full(num_tokens, -1 / num_tokens), np.zeros(num_experts)],
        A_ub=below.tocsr(),
        b_ub=np.zeros(len(row)),
        A_eq=total.tocsr(),
        b_eq=[slots_per_node],
        bounds=[(0, 1)] * num_tokens + [(1 / num_nodes, 1)] * num_experts,
        method="highs",
    )
    assert solved.success, solved.message
    return float(1 + solved.fun)
