"""The placements that the planner is compared with: linear, random, and DeepSeek EPLB's global greedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, Placement
from placement.eplb import balance_table, clean_load
from placement.errors import PlacementError
from placement.packing import copies_of, level
from placement.topology import Topology


def check_capacity(num_experts: int, num_ranks: int, rows_per_rank: int) -> None:
    """Raises PlacementError where the slots cannot hold every expert, or a rank has more rows than experts exist."""
    num_slots = num_ranks * rows_per_rank
    if num_slots < num_experts:
        raise PlacementError(
            f"{num_ranks} ranks x {rows_per_rank} slots per rank = {num_slots} slots hold no {num_experts} experts; "
            f"give at least {-(-num_experts // num_ranks)} slots per rank"
        )
    if rows_per_rank > num_experts:
        raise PlacementError(
            f"{rows_per_rank} slots per rank are more than the {num_experts} experts of a layer, "
            f"and no expert may lie twice on a rank; give at most {num_experts}"
        )


def rows_of_ranks(rows_per_rank: int | Sequence[int], topology: Topology, num_experts: int) -> NDArray[np.int64]:
    """The slots of a layer on each rank [R], from one number or one a rank.

    Raises PlacementError as `check_capacity`.
    """
    if isinstance(rows_per_rank, int):
        check_capacity(num_experts, topology.num_ranks, rows_per_rank)
        return np.full(topology.num_ranks, rows_per_rank, np.int64)
    rows = np.array(rows_per_rank, np.int64)
    if rows.shape != (topology.num_ranks,) or rows.min() < 1:
        raise PlacementError(
            f"slots per rank must be one number or {topology.num_ranks} numbers from 1 up, got {list(rows_per_rank)}"
        )
    if rows.sum() < num_experts:
        raise PlacementError(f"{rows.sum()} slots on {len(rows)} ranks hold no {num_experts} experts")
    if rows.max() > num_experts:
        raise PlacementError(f"{rows.max()} slots on a rank are more than the {num_experts} experts of a layer")
    return rows


def linear_placement(num_layers: int, num_experts: int, num_ranks: int, rows_per_rank: int) -> Placement:
    """Experts in id order, rank by rank: what a server does unasked. Spare rows go on with the next experts."""
    check_capacity(num_experts, num_ranks, rows_per_rank)
    first = np.arange(num_ranks + 1) * num_experts // num_ranks
    has_spare = num_ranks * rows_per_rank > num_experts
    rows = np.full((num_ranks, rows_per_rank), EMPTY, np.int32)
    for rank in range(num_ranks):
        width = rows_per_rank if has_spare else first[rank + 1] - first[rank]
        rows[rank, :width] = (first[rank] + np.arange(width)) % num_experts
    table = np.broadcast_to(rows.reshape(-1), (num_layers, rows.size))
    return Placement(epoch=0, num_ranks=num_ranks, num_experts=num_experts, physical_to_logical=table)


def random_placement(num_layers: int, num_experts: int, num_ranks: int, rows_per_rank: int, seed: int = 0) -> Placement:
    """Every expert once, the spare slots drawn at random, dealt out so that no rank has an expert twice."""
    check_capacity(num_experts, num_ranks, rows_per_rank)
    rng = np.random.default_rng(seed)
    table = np.stack([_random_layer(num_experts, num_ranks, rows_per_rank, rng) for _ in range(num_layers)])
    return Placement(epoch=0, num_ranks=num_ranks, num_experts=num_experts, physical_to_logical=table)


def _random_layer(num_experts: int, num_ranks: int, rows_per_rank: int, rng: np.random.Generator) -> NDArray[np.int32]:
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, expert in enumerate(rng.permutation(num_experts)):
        rows[index % num_ranks].append(int(expert))
    for row in rows:
        others = rng.permutation(np.setdiff1d(np.arange(num_experts), row))
        row.extend(others[: rows_per_rank - len(row)].tolist())
    return np.array(rows, np.int32).reshape(-1)


def eplb_placement(load: NDArray[Any], num_ranks: int, rows_per_rank: int) -> Placement:
    """DeepSeek EPLB's global policy (github.com/deepseek-ai/EPLB, `num_groups` not divisible), from its description.

    load [L, E]. Each spare slot goes to the expert with the highest load per copy; then copies are packed, heaviest
    first, onto the least loaded rank with a free slot. The original may put an expert twice on one rank. Here such a
    copy goes to the next rank, by a swap where it must, and the slot stays empty where no rank can take it.
    """
    check_capacity(load.shape[1], num_ranks, rows_per_rank)
    table = balance_table(load.astype(np.float64), num_ranks * rows_per_rank, 1, 1, num_ranks)
    return Placement(
        epoch=0, num_ranks=num_ranks, num_experts=load.shape[1], physical_to_logical=table.astype(np.int32)
    )


def balance_placement(load: NDArray[Any], num_ranks: int, rows_per_rank: int, *, enough: float = 1.0) -> Placement:
    """The best balance from loads alone: EPLB's greedy, then swaps with the heaviest rank while they lower it.

    load [L, E], counts or rates. Knows nothing of hops; for models of which only counts are known. Layers whose
    max/mean over ranks is enough already are left as the greedy has them.
    """
    check_capacity(load.shape[1], num_ranks, rows_per_rank)
    weight = clean_load(load)
    table = balance_table(weight, num_ranks * rows_per_rank, 1, 1, num_ranks)
    for layer in range(len(table)):
        copies = copies_of(table[layer], load.shape[1])
        _level_until(table[layer].reshape(num_ranks, rows_per_rank), weight[layer] / copies, enough)
    return Placement(
        epoch=0, num_ranks=num_ranks, num_experts=load.shape[1], physical_to_logical=table.astype(np.int32)
    )


def _level_until(rows: NDArray[np.int64], share: NDArray[np.float64], enough: float) -> None:
    """Swap in place until max/mean over ranks is enough or no swap lowers it. rows [R, n], share [E]: of one copy."""
    for _ in range(4 * rows.size):
        carried = np.where(rows == EMPTY, 0.0, share[rows]).sum(axis=1)
        if carried.max() <= enough * carried.mean():
            return
        before = rows.copy()
        level(rows, share, 1)
        if np.array_equal(rows, before):
            return
