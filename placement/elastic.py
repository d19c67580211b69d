"""Ranks that died, are drained, or joined: every expert somewhere, and as little moved as that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, ExpertId, Placement
from placement.eplb import clean_load
from placement.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """placement: on the live ranks, numbered as live_ranks lists them. copied: experts that a rank must fetch.

    from_checkpoint: experts that no live rank holds; their weights come from host copies or the checkpoint.
    """

    placement: Placement
    live_ranks: tuple[int, ...]
    copied: int
    from_checkpoint: tuple[ExpertId, ...]


def place_without(
    current: Placement,
    lost: frozenset[int],
    load: NDArray[np.float64],
    *,
    rows_per_rank: int | None = None,
    has_checkpoint: bool = True,
) -> Recovery:
    """The placement once some ranks are gone (dead or drained): survivors keep their experts, the homeless get slots.

    load [L, E]. Experts without a slot take an empty row, else the place of the copy that is spared most easily, on the
    least loaded rank that can. rows_per_rank may grow to make room. Raises PlacementError where the live slots cannot
    hold every expert, or an expert is lost for good (no copy lives and there is no checkpoint).
    """
    weight = clean_load(load)
    unknown = sorted(lost - set(range(current.num_ranks)))
    live = tuple(rank for rank in range(current.num_ranks) if rank not in lost)
    if unknown or not live:
        raise PlacementError(f"lost ranks {sorted(lost)} must be some, not all, of 0..{current.num_ranks - 1}")
    rows = current.rows_per_rank if rows_per_rank is None else rows_per_rank
    if rows < current.rows_per_rank or rows * len(live) < current.num_experts:
        raise PlacementError(
            f"{len(live)} live ranks x {rows} rows = {rows * len(live)} slots keep no {current.num_experts} experts "
            f"(nor may rows shrink below {current.rows_per_rank}); give at least "
            f"{max(current.rows_per_rank, -(-current.num_experts // len(live)))} rows per rank"
        )
    old = current.physical_to_logical.reshape(current.num_layers, current.num_ranks, -1)
    table = np.full((current.num_layers, len(live), rows), EMPTY, np.int32)
    table[:, :, : current.rows_per_rank] = old[:, list(live)]
    orphans: list[ExpertId] = []
    copied = 0
    for layer in range(current.num_layers):
        homeless = np.setdiff1d(np.arange(current.num_experts), table[layer])
        orphans += [ExpertId(layer, int(expert)) for expert in homeless]
        for expert in homeless[np.argsort(-weight[layer, homeless], kind="stable")]:
            _give_slot(table[layer], int(expert), weight[layer])
            copied += 1
    if orphans and not has_checkpoint:
        raise PlacementError(f"{orphans[0]} and {len(orphans) - 1} others live on lost ranks alone, with no checkpoint")
    placement = Placement(
        epoch=current.epoch + 1,
        num_ranks=len(live),
        num_experts=current.num_experts,
        physical_to_logical=table.reshape(current.num_layers, -1),
    )
    return Recovery(placement=placement, live_ranks=live, copied=copied, from_checkpoint=tuple(orphans))


def _give_slot(rows: NDArray[np.int32], expert: int, load: NDArray[np.float64]) -> None:
    """Put expert into an empty row, or over a copy that is not its expert's last, where the rank ends up lightest."""
    copies = np.bincount(rows[rows != EMPTY], minlength=len(load))
    share = load / np.maximum(copies, 1)
    total = np.where(rows == EMPTY, 0.0, share[rows]).sum(axis=1)
    free = rows == EMPTY
    spare = ~free & (copies[rows] > 1)
    candidates = np.argwhere(free if free.any() else spare)
    after = [total[rank] - (0.0 if rows[rank, row] == EMPTY else share[rows[rank, row]]) for rank, row in candidates]
    rank, row = candidates[int(np.argmin(after))]
    rows[rank, row] = expert


def place_with_joined(current: Placement, num_joined: int) -> Placement:
    """The current placement on a larger cluster: new ranks at the end, their slots empty, nothing moved yet.

    A re-plan within a budget or `relevel` then fills them. Raises PlacementError for a negative number.
    """
    if num_joined < 0:
        raise PlacementError(f"0 or more ranks can join, got {num_joined}")
    old = current.physical_to_logical
    empty = np.full((current.num_layers, num_joined * current.rows_per_rank), EMPTY, np.int32)
    return Placement(
        epoch=current.epoch + 1,
        num_ranks=current.num_ranks + num_joined,
        num_experts=current.num_experts,
        physical_to_logical=np.concatenate([old, empty], axis=1),
    )
