"""The placements that the planner is compared with: linear, random, and DeepSeek EPLB's global greedy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, Placement
from placement.errors import PlacementError


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


def linear_placement(num_layers: int, num_experts: int, num_ranks: int, rows_per_rank: int) -> Placement:
    """Experts in id order, rank by rank: what a server does unasked. Spare slots start again at expert 0.

    Where E does not divide by R the leading ranks take one expert more. Spare rows repeat the experts in order.
    """
    check_capacity(num_experts, num_ranks, rows_per_rank)
    first = np.arange(num_ranks + 1) * num_experts // num_ranks
    rows = np.full((num_ranks, rows_per_rank), EMPTY, np.int32)
    for rank in range(num_ranks):
        own = np.arange(first[rank], first[rank] + num_experts)[:rows_per_rank] % num_experts
        spare_from = first[rank + 1] - first[rank]
        spread = (num_ranks * rows_per_rank) // num_experts > 1 or num_ranks * rows_per_rank > num_experts
        rows[rank, : len(own) if spread else spare_from] = own if spread else own[:spare_from]
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


def replicate_by_load(load: NDArray[np.float64], num_slots: int, most_copies: int) -> NDArray[np.int64]:
    """Copies [E] of each expert of one layer: spare slots go, one by one, to the highest load per copy.

    Equal loads (zero ones too) share the slots evenly. No expert gets more than most_copies; slots may be left over.
    """
    copies = np.ones(len(load), np.int64)
    for _ in range(num_slots - len(load)):
        per_copy = np.where(copies < most_copies, load / copies, -1.0)
        best = np.flatnonzero(per_copy == per_copy.max())
        if per_copy[best[0]] < 0:
            break
        copies[best[np.argmin(copies[best])]] += 1
    return copies


def pack_balanced(
    load: NDArray[np.float64], copies: NDArray[np.int64], num_ranks: int, rows_per_rank: int
) -> NDArray[np.int32]:
    """Pack copies into ranks, heaviest copy first, each on the least loaded rank with a free row.

    load, copies [E]. Returns int32 [R, rows]. A rank that has the expert already is passed over; where only such ranks
    have free rows, one of them swaps an expert with another rank, and where none can, the slot stays -1.
    """
    rows = np.full((num_ranks, rows_per_rank), EMPTY, np.int32)
    fill = np.zeros(num_ranks, np.int64)
    total = np.zeros(num_ranks)
    per_copy = load / copies
    for expert in np.argsort(-per_copy, kind="stable"):
        for _ in range(copies[expert]):
            free = fill < rows_per_rank
            allowed = free & ~(rows == expert).any(axis=1)
            if allowed.any():
                rank = int(np.argmin(np.where(allowed, total, np.inf)))
                rows[rank, fill[rank]] = expert
                total[rank] += per_copy[expert]
                fill[rank] += 1
            else:
                _swap_in(rows, fill, int(expert))
    return rows


def _swap_in(rows: NDArray[np.int32], fill: NDArray[np.int64], expert: int) -> None:
    """Give expert a row on a full rank that lacks it; what lay there moves to a rank with a free row."""
    for spare in np.flatnonzero(fill < rows.shape[1]):
        for rank in np.flatnonzero(~(rows == expert).any(axis=1)):
            for row, moved in enumerate(rows[rank]):
                if moved != EMPTY and moved not in rows[spare]:
                    rows[spare, fill[spare]] = moved
                    rows[rank, row] = expert
                    fill[spare] += 1
                    return


def eplb_placement(load: NDArray[np.int64], num_ranks: int, rows_per_rank: int) -> Placement:
    """DeepSeek EPLB's global policy (github.com/deepseek-ai/EPLB, `num_groups` not divisible), from its description.

    load [L, E]. Each spare slot goes to the expert with the highest load per copy; then copies are packed, heaviest
    first, onto the least loaded rank with a free slot. The original may put an expert twice on one rank. Here such a
    copy goes to the next rank, by a swap where it must, and the slot stays empty where no rank can take it.
    """
    num_layers, num_experts = load.shape
    check_capacity(num_experts, num_ranks, rows_per_rank)
    layers = []
    for layer in range(num_layers):
        weight = load[layer].astype(np.float64)
        copies = replicate_by_load(weight, num_ranks * rows_per_rank, num_ranks)
        layers.append(pack_balanced(weight, copies, num_ranks, rows_per_rank).reshape(-1))
    table = np.stack(layers)
    return Placement(epoch=0, num_ranks=num_ranks, num_experts=num_experts, physical_to_logical=table)
