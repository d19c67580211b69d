"""Match a fresh placement's arbitrary names to the present one, so that only what must move moves.

Which node (or rank in a node) a set of experts lies on makes no difference to co-activation or balance where the tree
looks the same below; only homes tell them apart, and those are drawn anew. So names are chosen to keep most in place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from placement.core import EMPTY, Placement
from placement.topology import Topology

UNLIKE = -1e6


def match_labels(
    draft: Placement, current: Placement, topology: Topology, rows_of_rank: NDArray[np.int64] | None = None
) -> Placement:
    """The draft with its nodes and ranks renamed, layer by layer, to overlap the current placement most.

    rows_of_rank [R], where ranks have unlike numbers of slots: only ranks of one size trade names. Experts that stay on
    a rank keep their rows. Where the ranks or rows differ nothing can be matched and the draft is returned as it is.
    The epoch is the current one's plus 1.
    """
    epoch = current.epoch + 1
    same_shape = (draft.num_ranks, draft.num_slots) == (current.num_ranks, current.num_slots)
    if not same_shape:
        return draft.with_epoch(epoch)
    old = current.physical_to_logical.reshape(current.num_layers, current.num_ranks, -1)
    new = draft.physical_to_logical.reshape(draft.num_layers, draft.num_ranks, -1)
    node_of_rank = topology.node_of_rank()
    tables = [
        keep_rows(
            new[layer][match_ranks(old[layer], new[layer], node_of_rank, draft.num_experts, rows_of_rank)], old[layer]
        )
        for layer in range(draft.num_layers)
    ]
    return Placement(
        epoch=epoch,
        num_ranks=draft.num_ranks,
        num_experts=draft.num_experts,
        physical_to_logical=np.stack(tables).reshape(draft.num_layers, -1),
    )


def _held(rows: NDArray[np.int32], num_experts: int) -> NDArray[np.float64]:
    held = np.zeros((len(rows), num_experts))
    rank, row = np.nonzero(rows != EMPTY)
    held[rank, rows[rank, row]] = 1
    return held


def match_ranks(
    old: NDArray[np.int32],
    new: NDArray[np.int32],
    node_of_rank: NDArray[np.int32],
    num_experts: int,
    rows_of_rank: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """source [R]: whose rows of the draft each rank should take. Nodes of one size trade names, then ranks inside.

    rows_of_rank [R]: a rank takes the rows of one with as many slots alone.
    """
    common = _held(old, num_experts) @ _held(new, num_experts).T
    if rows_of_rank is not None:
        common = np.where(rows_of_rank[:, None] == rows_of_rank[None, :], common, UNLIKE)
    num_nodes = int(node_of_rank[-1]) + 1
    inside = [np.flatnonzero(node_of_rank == node) for node in range(num_nodes)]
    value = np.full((num_nodes, num_nodes), 2 * UNLIKE * len(node_of_rank))
    pairs = {}
    for here in range(num_nodes):
        for there in range(num_nodes):
            if len(inside[here]) == len(inside[there]):
                block = common[np.ix_(inside[here], inside[there])]
                rows, columns = linear_sum_assignment(-block)
                value[here, there] = block[rows, columns].sum()
                pairs[here, there] = inside[there][columns]
    source = np.zeros(len(node_of_rank), np.int64)
    for here, there in zip(*linear_sum_assignment(-value), strict=True):
        source[inside[here]] = pairs[int(here), int(there)]
    return source


def keep_rows(new: NDArray[np.int32], old: NDArray[np.int32]) -> NDArray[np.int32]:
    """Reorder each rank's rows [R, rows] so that an expert which the rank had already keeps its row."""
    kept = np.full_like(new, EMPTY)
    for rank in range(len(new)):
        stays = np.isin(old[rank], new[rank]) & (old[rank] != EMPTY)
        kept[rank, stays] = old[rank, stays]
        arriving = [expert for expert in new[rank] if expert != EMPTY and expert not in old[rank]]
        kept[rank, np.flatnonzero(~stays)[: len(arriving)]] = arriving
    return kept
