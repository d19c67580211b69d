"""Which experts tokens use together in a layer, and which one after another from a layer to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.graph import count_coactivation, count_transition
from placement.report.activation import evenly
from placement.trace import RoutingTrace

# Maps of all pairs of experts are the bulk of a page: as many layers as stay under this many cells each.
MAX_COACTIVATION_CELLS, MAX_TRANSITION_CELLS, MAX_MAPS = 280_000, 200_000, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMap:
    """share [n, m]: the part of the tokens that use both expert rows[i] of a layer and columns[j] of layer `other`.

    Experts stand in the order of their ranks. other is layer itself, or the next.
    """

    layer: int
    other: int
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    share: NDArray[np.float64]

    def strongest(self, most: int) -> list[tuple[int, int, float]]:
        """(expert, expert, share) of the strongest pairs, each once."""
        share = np.tril(self.share, -1) if self.layer == self.other else self.share
        best = np.argsort(-share, axis=None, kind="stable")[: min(most, np.count_nonzero(share))]
        return [
            (int(self.rows[row]), int(self.columns[column]), float(share[row, column]))
            for row, column in zip(*np.unravel_index(best, share.shape), strict=True)
        ]


def coactivation_maps(placement: Placement, trace: RoutingTrace) -> tuple[PairMap, ...]:
    maps = []
    for layer in evenly(trace.num_layers, _fits(MAX_COACTIVATION_CELLS, trace)):
        order = _shown(placement, layer, trace, MAX_COACTIVATION_CELLS)
        pairs = count_coactivation(trace.experts[:, layer], trace.num_experts)
        share = pairs[np.ix_(order, order)] / trace.num_tokens
        maps.append(PairMap(layer=layer, other=layer, rows=order, columns=order, share=share))
    return tuple(maps)


def transition_maps(placement: Placement, trace: RoutingTrace) -> tuple[PairMap, ...]:
    """Nothing where there is one layer only."""
    if trace.num_layers < 2:
        return ()
    maps = []
    for layer in evenly(trace.num_layers - 1, _fits(MAX_TRANSITION_CELLS, trace)):
        rows, columns = (_shown(placement, one, trace, MAX_TRANSITION_CELLS) for one in (layer, layer + 1))
        steps = count_transition(
            np.ascontiguousarray(trace.experts[:, layer]),
            np.ascontiguousarray(trace.experts[:, layer + 1]),
            trace.num_experts,
        )
        share = steps[np.ix_(rows, columns)] / trace.num_tokens
        maps.append(PairMap(layer=layer, other=layer + 1, rows=rows, columns=columns, share=share))
    return tuple(maps)


def by_rank(placement: Placement, layer: int) -> NDArray[np.intp]:
    """The experts of a layer [E] in the order of the ranks that hold them, each at its first rank."""
    row = placement.physical_to_logical[layer]
    return np.array(list(dict.fromkeys(row[row >= 0].tolist())), np.intp)


def _shown(placement: Placement, layer: int, trace: RoutingTrace, cells: int) -> NDArray[np.intp]:
    """The experts of a map, by rank: all, or the busiest where a map of all is too large."""
    order = by_rank(placement, layer)
    load = np.bincount(trace.experts[:, layer].ravel(), minlength=trace.num_experts)
    busiest = np.argsort(-load, kind="stable")[: math.isqrt(cells)]
    return order[np.isin(order, busiest)]


def _fits(cells: int, trace: RoutingTrace) -> int:
    return min(MAX_MAPS, cells // trace.num_experts**2)
