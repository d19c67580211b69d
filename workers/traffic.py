"""What a rank's traffic came to, counted as it is routed: cheap sums that a live view takes its differences of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True)
class TrafficCounters:
    """Sums over layers since the rank started. tokens: whose home is here; nodes_visited, ranks_visited: by them, other
    nodes and ranks than home. pairs: of token and expert that this rank computed, whosever token it was.
    """

    tokens: int = 0
    nodes_visited: int = 0
    ranks_visited: int = 0
    pairs: int = 0

    def count_sent(self, ranks: NDArray[np.int32], home: int, node_of_rank: NDArray[np.int32]) -> None:
        """ranks [T, K]: who serves each pair of this rank's tokens in one layer."""
        served = np.sort(ranks, axis=1)
        self.tokens += len(served)
        self.ranks_visited += _others(served, home)
        # Nodes are numbered in rank order, so they are sorted too.
        self.nodes_visited += _others(node_of_rank[served], int(node_of_rank[home]))


def _others(visited: NDArray[np.int32], home: int) -> int:
    """Different values of each row [T, K] (sorted) besides home, summed over rows."""
    first = visited != home
    first[:, 1:] &= visited[:, 1:] != visited[:, :-1]
    return int(first.sum())
