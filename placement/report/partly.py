"""Part of a plan: layers are placed independently, so a plan may be taken in some of its layers and not in others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement

# A part is worth a word where it brings nearly all of the saving for at most half of the copies.
LEAST_SAVING, MOST_COPIES = 0.9, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """layers to take, in order; the share of the plan's saving that they bring, and of its copies that they cost."""

    layers: tuple[int, ...]
    saving: float
    copies: float


def best_part(before: NDArray[np.float64], after: NDArray[np.float64], copies: NDArray[np.int64]) -> Part | None:
    """The fewest copies that bring 90% of the saving, if they are at most half of all; else None.

    before, after [L]: other nodes visited in each layer; copies [L]: experts to be copied.
    """
    gain = before - after
    if gain.sum() <= 0 or not copies.sum():
        return None
    helping = np.flatnonzero((gain > 0) & (copies > 0))
    helping = helping[np.argsort(-gain[helping] / copies[helping], kind="stable")]
    enough = np.flatnonzero(np.cumsum(gain[helping]) >= LEAST_SAVING * gain.sum())
    if not len(enough):
        return None
    taken = np.sort(helping[: enough[0] + 1])
    part = Part(
        layers=tuple(taken.tolist()),
        saving=float(gain[taken].sum() / gain.sum()),
        copies=float(copies[taken].sum() / copies.sum()),
    )
    return part if part.copies <= MOST_COPIES else None


def copies_by_layer(before: Placement, after: Placement) -> NDArray[np.int64]:
    """[L]: experts that some rank holds after and not before."""
    held, wanted = before.copies_per_rank() > 0, after.copies_per_rank() > 0
    counts: NDArray[np.int64] = (wanted & ~held).sum(axis=(1, 2))
    return counts


def take_part(before: Placement, after: Placement, layers: tuple[int, ...]) -> Placement:
    """The plan's placement in these layers, the present one in the others, under the plan's epoch."""
    chosen = np.isin(np.arange(after.num_layers), layers)[:, None]
    return replace(
        after,
        physical_to_logical=np.where(chosen, after.physical_to_logical, before.physical_to_logical),
        tiers=np.where(chosen, after.tiers, before.tiers),
        rank_weights=np.where(chosen, after.rank_weights, before.rank_weights),
    )
