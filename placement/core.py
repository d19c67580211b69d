"""The nouns that everything else is said in: expert, slot, tier, placement.

R ranks, L MoE layers, E logical experts, P physical slots. The physical id of a slot is `rank * rows_per_rank + row`,
the rank-major order that DeepSeek's EPLB, vLLM, SGLang and TensorRT-LLM all use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from placement.errors import PlacementError

EMPTY = -1
EVEN_WEIGHT = 1024


@dataclass(frozen=True, slots=True, order=True)
class ExpertId:
    """A logical expert: MoE layer (0-based among MoE layers) and index within the layer."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for one expert of one layer: the rank, and the row on that rank."""

    rank: int
    row: int


class Tier(IntEnum):
    """Where a slot's weights wait: always on the GPU, in host memory behind the cache, quantised there, on disk."""

    HOT = 0
    WARM = 1
    COLD = 2
    DISK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which expert lies in which slot, for every layer, under one epoch.

    physical_to_logical: int32 [L, P], logical expert ids, -1 for an empty slot, rank-major.
    tiers: uint8 [L, P], a `Tier` per slot; warm unless given.
    rank_weights: uint16 [L, R], each from 1 up: where a token comes by several holders of an expert, the chance that a
    rank serves it goes with its weight. All alike unless given.

    Every expert has at least one slot in every layer, and no expert has two slots on one rank.
    Raises PlacementError, naming the layer and the expert, where that does not hold.
    """

    epoch: int
    num_ranks: int
    num_experts: int
    physical_to_logical: NDArray[np.int32]
    tiers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    rank_weights: NDArray[np.uint16] = field(default_factory=lambda: np.zeros((0, 0), np.uint16))

    def __post_init__(self) -> None:
        table = np.array(self.physical_to_logical, dtype=np.int32, ndmin=2)
        tiers = np.array(self.tiers, np.uint8) if self.tiers.size else np.full(table.shape, Tier.WARM, np.uint8)
        weights = np.array(self.rank_weights, np.uint16)
        if not weights.size:
            weights = np.full((len(table), max(1, self.num_ranks)), EVEN_WEIGHT, np.uint16)
        for name, array in (("physical_to_logical", table), ("tiers", tiers), ("rank_weights", weights)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        self._check()

    def _check(self) -> None:
        table = self.physical_to_logical
        if self.epoch < 0 or self.num_ranks < 1 or self.num_experts < 1 or table.ndim != 2 or table.size == 0:
            raise PlacementError(
                f"a placement needs epoch >= 0, num_ranks >= 1, num_experts >= 1 and a table [layers, slots]; got "
                f"epoch {self.epoch}, num_ranks {self.num_ranks}, num_experts {self.num_experts}, table {table.shape}"
            )
        if self.num_experts > table.shape[1]:
            raise PlacementError(
                f"{self.num_experts} experts need at least as many slots per layer, but there are {table.shape[1]}"
            )
        if table.shape[1] % self.num_ranks:
            raise PlacementError(f"{table.shape[1]} slots per layer do not divide by {self.num_ranks} ranks")
        if self.tiers.shape != table.shape or self.tiers.max() > Tier.DISK:
            raise PlacementError(f"tiers must be {table.shape} values from 0 (hot) to 3 (disk)")
        if self.rank_weights.shape != (len(table), self.num_ranks) or not self.rank_weights.all():
            raise PlacementError(f"rank_weights must be {(len(table), self.num_ranks)} values from 1 to 65535")
        if table.min() < EMPTY or table.max() >= self.num_experts:
            layer, slot = np.argwhere((table < EMPTY) | (table >= self.num_experts))[0]
            raise PlacementError(
                f"layer {layer}, slot {slot}: expert {table[layer, slot]} is not in 0..{self.num_experts - 1} (or -1)"
            )
        copies = self.copies_per_rank()
        if copies.max() > 1:
            layer, rank, expert = np.argwhere(copies > 1)[0]
            raise PlacementError(
                f"layer {layer}: expert {expert} lies {copies[layer, rank, expert]} times on rank {rank}"
            )
        homeless = np.argwhere(copies.sum(axis=1) == 0)
        if len(homeless):
            layer, expert = homeless[0]
            raise PlacementError(f"layer {layer}: expert {expert} has no slot ({len(homeless)} such in all)")

    @property
    def num_layers(self) -> int:
        return int(self.physical_to_logical.shape[0])

    @property
    def num_slots(self) -> int:
        """P, the slots of one layer on all ranks."""
        return int(self.physical_to_logical.shape[1])

    @property
    def rows_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    def copies_per_rank(self) -> NDArray[np.uint8]:
        """[L, R, E]: how many slots of a rank hold an expert (0 or 1 in a valid placement)."""
        layers, slots = self.physical_to_logical.shape
        copies = np.zeros((layers, self.num_ranks, self.num_experts), np.uint8)
        layer, slot = np.nonzero(self.physical_to_logical != EMPTY)
        rank = slot // (slots // self.num_ranks)
        np.add.at(copies, (layer, rank, self.physical_to_logical[layer, slot]), 1)
        return copies

    def weights_per_rank(self) -> NDArray[np.uint16]:
        """[L, R, E]: a rank's weight where it holds an expert, else 0, as the replica choice takes it."""
        weights: NDArray[np.uint16] = self.copies_per_rank() * self.rank_weights[:, :, None]
        return weights

    def experts_on(self, rank: int) -> frozenset[ExpertId]:
        """The experts that a rank holds, over all layers."""
        rows = slice(rank * self.rows_per_rank, (rank + 1) * self.rows_per_rank)
        return frozenset(
            ExpertId(layer, int(expert))
            for layer, row in enumerate(self.physical_to_logical[:, rows])
            for expert in row
            if expert != EMPTY
        )

    def with_epoch(self, epoch: int) -> Placement:
        return Placement(
            epoch=epoch,
            num_ranks=self.num_ranks,
            num_experts=self.num_experts,
            physical_to_logical=self.physical_to_logical,
            tiers=self.tiers,
            rank_weights=self.rank_weights,
        )
