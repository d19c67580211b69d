"""METIS: cut one layer's co-activation graph into the children of a tree group, with exact capacities.

METIS balances one weight (the load) and knows nothing of rows, so a repair follows that moves the experts which lose
least until every child holds no more than its slots.
"""

from __future__ import annotations

import numpy as np
import pymetis
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

LARGEST_WEIGHT = 1_000_000


def cut(
    load: NDArray[np.float64],
    coactivation: NDArray[np.float64],
    sizes: NDArray[np.int64],
    share: NDArray[np.float64],
    seed: int,
) -> NDArray[np.int64]:
    """The part [n] of each of n experts: load [n], coactivation [n, n] symmetric, sizes [U] most experts in a part.

    share [U], summing to 1: the part of the load that each should carry.
    """
    num_experts, num_parts = len(load), len(sizes)
    assert num_experts <= sizes.sum()
    if num_parts == 1 or num_experts == 1:
        return repair(np.zeros(num_experts, np.int64), load, coactivation, sizes, share)
    weights = _to_integers(coactivation)
    np.fill_diagonal(weights, 0)
    row, column = np.nonzero(weights)
    starts = np.searchsorted(row, np.arange(num_experts + 1))
    _, part = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(starts.astype(np.int32), column.astype(np.int32)),
        vweights=(_to_integers(load) + 1).astype(np.int32),
        eweights=weights[row, column].astype(np.int32),
        tpwgts=share.tolist(),
        recursive=num_parts <= 8,
        options=pymetis.Options(seed=seed),
    )
    return repair(np.asarray(part, np.int64), load, coactivation, sizes, share)


def _to_integers(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """METIS counts in 32-bit integers: scale so that the sum over an expert's edges cannot overflow."""
    largest = float(values.max())
    scale = min(1.0, LARGEST_WEIGHT / largest / max(1, len(values) // 32)) if largest > 0 else 1.0
    return np.ceil(values * scale).astype(np.int64)


def repair(
    part: NDArray[np.int64],
    load: NDArray[np.float64],
    coactivation: NDArray[np.float64],
    sizes: NDArray[np.int64],
    share: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Move experts out of parts that hold more than sizes [U] allows, least loss of co-activation first.

    Among parts with room, the one that the expert is most tied to; equal ties go to the one with most load to spare.
    """
    part = part.copy()
    count = np.bincount(part, minlength=len(sizes))
    carried = np.bincount(part, weights=load, minlength=len(sizes))
    ties = _sum_by_part(coactivation, part, len(sizes)).T.copy()
    while (count > sizes).any():
        source = int(np.argmax(count - sizes))
        members = np.flatnonzero(part == source)
        open_parts = np.flatnonzero(count < sizes)
        gain = ties[np.ix_(members, open_parts)] - ties[members, source][:, None]
        lack = load.sum() * share[open_parts] - carried[open_parts]
        order = np.lexsort((np.tile(-lack, len(members)), -gain.ravel()))
        expert = int(members[order[0] // len(open_parts)])
        target = int(open_parts[order[0] % len(open_parts)])
        part[expert] = target
        count[source] -= 1
        count[target] += 1
        carried[source] -= load[expert]
        carried[target] += load[expert]
        ties[:, source] -= coactivation[:, expert]
        ties[:, target] += coactivation[:, expert]
    return part


def _sum_by_part(values: NDArray[np.float64], part: NDArray[np.int64], num_parts: int) -> NDArray[np.float64]:
    """values [m, n] summed over the members of each part [n] -> [num_parts, m].

    Not a matrix product: layers are placed in threads, and BLAS would have threads of its own for each.
    """
    return np.stack([values[:, part == number].sum(axis=1) for number in range(num_parts)])


def align(part: NDArray[np.int64], demand: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rename parts so that they lie where their tokens' homes are; parts trade names only where sizes [U] allow.

    demand [U, n]: how often tokens whose home is at unit u chose expert e.
    """
    num_units = len(sizes)
    wish = _sum_by_part(demand, part, num_units)
    count = np.bincount(part, minlength=num_units)
    fits = count[:, None] <= sizes[None, :]
    rows, columns = linear_sum_assignment(np.where(fits, -wish, wish.sum() + 1.0))
    name = np.empty(num_units, np.int64)
    name[rows] = columns
    return name[part]
