"""DeepSeek EPLB's and vLLM's `rebalance_experts`, drop-in: same arguments, same shapes, always a valid placement.

The algorithm is the one of github.com/deepseek-ai/EPLB: groups to nodes, spare slots inside a node to the highest load
per copy, copies to GPUs heaviest first. It differs where the original fails: no expert lies twice on a GPU, zero load
spreads evenly, num_groups 0 means no groups, and loads that are no loads are counted as 0 with a warning.
"""

from __future__ import annotations

import warnings
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY
from placement.errors import PlacementError
from placement.matching import keep_rows, match_ranks
from placement.packing import copies_of, pack, replicate


def clean_load(weight: Any) -> NDArray[np.float64]:
    """weight [L, E] as float64. NaN, infinite and negative values become 0, with a warning that counts them."""
    load = np.array(weight, np.float64)
    if load.ndim != 2 or 0 in load.shape:
        raise PlacementError(f"the load must be [layers, experts] with at least one of each, got {load.shape}")
    wrong = ~(np.isfinite(load) & (load >= 0))
    if wrong.any():
        layer, expert = np.argwhere(wrong)[0]
        warnings.warn(
            f"{wrong.sum()} of {load.size} loads are NaN, infinite or negative and count as 0; the first is layer "
            f"{layer}, expert {expert}: {load[layer, expert]}",
            stacklevel=2,
        )
        load[wrong] = 0.0
    return load


@nb.njit(cache=True, nogil=True)
def _balance_layer(load: Any, num_slots: Any, num_groups: Any, num_nodes: Any, num_gpus: Any, out: Any) -> None:
    """One layer: load [E] -> out [P], rank-major."""
    num_experts = len(load)
    group_size = num_experts // num_groups
    node_of_group = np.zeros((num_nodes, num_groups // num_nodes), np.int64)
    if num_groups == num_nodes:
        node_of_group[:, 0] = np.arange(num_nodes)
    else:
        of_group = load.reshape(num_groups, group_size).sum(axis=1)
        node_of_group[:] = pack(np.arange(num_groups), of_group, num_nodes, num_groups // num_nodes)
    slots_per_node, gpus_per_node = num_slots // num_nodes, num_gpus // num_nodes
    for node in range(num_nodes):
        members = np.empty(num_experts // num_nodes, np.int64)
        for place, group in enumerate(node_of_group[node]):
            members[place * group_size : (place + 1) * group_size] = np.arange(group_size) + group * group_size
        inside = load[members]
        experts = replicate(inside, slots_per_node, gpus_per_node)
        weight_of = inside / copies_of(experts, len(inside))
        if slots_per_node == gpus_per_node:
            rows = experts.reshape(gpus_per_node, 1)
        else:
            rows = pack(experts, weight_of, gpus_per_node, slots_per_node // gpus_per_node)
        for index, expert in enumerate(rows.ravel()):
            out[node * slots_per_node + index] = members[expert] if expert >= 0 else -1


@nb.njit(cache=True, nogil=True)
def _balance(load: Any, num_slots: Any, num_groups: Any, num_nodes: Any, num_gpus: Any) -> Any:
    table = np.empty((len(load), num_slots), np.int64)
    for layer in range(len(load)):
        _balance_layer(load[layer], num_slots, num_groups, num_nodes, num_gpus, table[layer])
    return table


def _check_shape(num_experts: int, num_replicas: int, num_nodes: int, num_gpus: int) -> None:
    if min(num_replicas, num_nodes, num_gpus) < 1 or num_replicas % num_gpus or num_gpus % num_nodes:
        raise PlacementError(
            f"{num_replicas} slots must divide by {num_gpus} GPUs, and the GPUs by {num_nodes} nodes, each from 1 up"
        )
    if num_replicas < num_experts:
        raise PlacementError(f"{num_replicas} slots hold no {num_experts} experts; give at least {num_experts}")
    if num_replicas // num_gpus > num_experts:
        raise PlacementError(
            f"{num_replicas} slots on {num_gpus} GPUs are more than {num_experts} experts a GPU, "
            f"and no expert may lie twice on one"
        )


def balance_table(
    load: NDArray[np.float64], num_slots: int, num_groups: int, num_nodes: int, num_gpus: int
) -> NDArray[np.int64]:
    """EPLB's table [L, P] with no expert twice on a GPU: load [L, E]. -1 where a slot can take none.

    Hierarchical where the groups divide by the nodes (and each node has room for its experts), else global.
    """
    num_experts = load.shape[1]
    _check_shape(num_experts, num_slots, num_nodes, num_gpus)
    grouped = num_groups > 0 and num_groups % num_nodes == 0 and num_experts % num_groups == 0
    roomy = num_slots // num_gpus <= num_experts // num_nodes
    groups, nodes = (num_groups, num_nodes) if grouped and roomy else (1, 1)
    table: NDArray[np.int64] = _balance(load, num_slots, groups, nodes, num_gpus)
    return table


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """EPLB's signature: weight [L, E], num_replicas P -> (phy2log [L, P], log2phy [L, E, X], logcnt [L, E]), int64.

    X is the largest number of copies; log2phy is padded with -1. Raises PlacementError where P does not divide by the
    GPUs, the GPUs not by the nodes, or P is below E.
    """
    phy2log = balance_table(clean_load(weight), num_replicas, num_groups, num_nodes, num_gpus)
    num_experts = np.shape(weight)[1]
    logcnt = np.stack([np.bincount(row[row != EMPTY], minlength=num_experts) for row in phy2log])
    log2phy = np.full((*logcnt.shape, int(logcnt.max())), EMPTY, np.int64)
    seen = np.zeros_like(logcnt)
    for layer, row in enumerate(phy2log):
        for slot in np.flatnonzero(row != EMPTY):
            expert = row[slot]
            log2phy[layer, expert, seen[layer, expert]] = slot
            seen[layer, expert] += 1
    return phy2log, log2phy, logcnt


def rebalance_experts_from(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: Any = None,
) -> NDArray[np.int64]:
    """vLLM's signature: as `rebalance_experts`, returning phy2log [L, P] alone.

    With the old table [L, P] of the same shape, ranks take the names that keep most experts in place (inside a node
    where groups are kept), and an expert that stays on a rank keeps its row.
    """
    table = balance_table(clean_load(weight), num_replicas, num_groups, num_nodes, num_ranks)
    if old_global_expert_indices is None or np.shape(old_global_expert_indices) != table.shape:
        return table
    nodes = np.arange(num_ranks, dtype=np.int32) // (num_ranks // num_nodes)
    kept = []
    for old_row, new_row in zip(np.asarray(old_global_expert_indices), table, strict=True):
        old = old_row.astype(np.int32).reshape(num_ranks, -1)
        new = new_row.astype(np.int32).reshape(num_ranks, -1)
        source = match_ranks(old, new, nodes, np.shape(weight)[1])
        kept.append(keep_rows(new[source], old).reshape(-1))
    return np.stack(kept).astype(np.int64)
