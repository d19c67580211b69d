"""What lies where on each rank: slots by tier, and the bytes that they take of what the machine has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, Placement, Tier

TIERS = {
    Tier.HOT: "hot, always on the GPU",
    Tier.WARM: "warm, in host memory",
    Tier.COLD: "cold, quantised in host memory",
    Tier.DISK: "on disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """slots [R, tiers]: slots that hold an expert, over all layers; empty [R]: slots that hold none."""

    slots: NDArray[np.int64]
    empty: NDArray[np.int64]

    @property
    def tiers(self) -> list[Tier]:
        """Those that any slot has."""
        return [tier for tier in Tier if self.slots[:, tier].any()]

    @property
    def filled(self) -> NDArray[np.int64]:
        """[R]"""
        filled: NDArray[np.int64] = self.slots.sum(axis=1)
        return filled


def count_memory(placement: Placement) -> Memory:
    shape = (placement.num_layers, placement.num_ranks, placement.rows_per_rank)
    filled = (placement.physical_to_logical != EMPTY).reshape(shape)
    tiers = placement.tiers.reshape(shape)
    return Memory(
        slots=np.stack([(filled & (tiers == tier)).sum(axis=(0, 2)) for tier in Tier], axis=1),
        empty=(~filled).sum(axis=(0, 2)),
    )
