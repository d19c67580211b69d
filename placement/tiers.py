"""Tiers: which slots stay on the GPU, which wait in host memory, which are quantised there, which lie on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, ExpertId, Placement, Tier
from placement.errors import ConfigError, TraceError
from placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBudget:
    """Per rank: GPU slots for experts of all layers together, and host bytes; sizes of an expert whole and quantised.

    hot_share: the part of the GPU slots that is never evicted; the rest is the cache for warm and cold experts.
    """

    gpu_slots: int
    host_bytes: float
    expert_bytes: float
    cold_bytes: float
    hot_share: float = 0.5

    def __post_init__(self) -> None:
        if self.gpu_slots < 1 or min(self.host_bytes, self.expert_bytes, self.cold_bytes) < 0:
            raise ConfigError(f"a tier budget needs gpu_slots >= 1 and bytes >= 0, got {self}")
        if not 0 <= self.hot_share <= 1 or self.cold_bytes > self.expert_bytes:
            raise ConfigError(f"hot_share must lie in 0..1 and cold_bytes not above expert_bytes, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """placement with its tiers, and what to expect of them.

    hit_rate: share of expert reads that find the GPU; stall_s: of the slowest rank in a step; num_disk: slots that fit
    nowhere but on disk.
    """

    placement: Placement
    hit_rate: float
    stall_s: float
    num_disk: int


def slot_rates(placement: Placement, activated: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chance [L, P] that a slot's expert is read in a step: activated [L, E] shared by its copies, 0 if empty."""
    if activated.shape != (placement.num_layers, placement.num_experts):
        raise TraceError(
            f"'activated' must be [{placement.num_layers}, {placement.num_experts}], got {list(activated.shape)}"
        )
    table = placement.physical_to_logical
    copies = placement.copies_per_rank().sum(axis=1)
    rate = np.take_along_axis(activated / copies, np.maximum(table, 0), axis=1)
    result: NDArray[np.float64] = np.where(table == EMPTY, 0.0, rate)
    return result


def choose_tiers(
    placement: Placement, topology: Topology, activated: NDArray[np.float64], budget: TierBudget
) -> TierPlan:
    """Give every slot a tier, rank by rank, the most read first.

    activated [L, E]: the chance that an expert is read in a step. The hottest slots stay on the GPU; of the others the
    most read lie whole in host memory as far as the bytes go, then quantised, then on disk. Each rank decides how many
    to quantise so that as few as possible go to disk. Hits in the cache: its slots go to the most read of the rest.
    """
    rates = slot_rates(placement, activated)
    layers, width = placement.num_layers, placement.rows_per_rank
    tiers = np.full(rates.shape, Tier.WARM, np.uint8)
    hits = reads = 0.0
    stall = np.zeros(placement.num_ranks)
    for rank in range(placement.num_ranks):
        own = slice(rank * width, (rank + 1) * width)
        filled = placement.physical_to_logical[:, own].reshape(-1) != EMPTY
        rate = rates[:, own].reshape(-1)
        order = np.argsort(-rate, kind="stable")
        order = order[filled[order]]
        tier = np.full(len(rate), Tier.WARM, np.uint8)
        tier[order] = _tiers_in_order(len(order), budget)
        tiers[:, own] = tier.reshape(layers, width)
        cached = order[: budget.gpu_slots]
        missed = order[budget.gpu_slots :]
        hits += float(rate[cached].sum())
        reads += float(rate[order].sum())
        size = np.where(tier[missed] == Tier.COLD, budget.cold_bytes, budget.expert_bytes)
        stall[rank] = float((rate[missed] * size).sum()) / topology.device.host_link_bandwidth
    return TierPlan(
        placement=replace(placement, tiers=tiers),
        hit_rate=hits / reads if reads > 0 else 1.0,
        stall_s=float(stall.max()),
        num_disk=int((tiers == Tier.DISK).sum()),
    )


def hottest_first(placement: Placement, rank: int) -> list[ExpertId]:
    """A rank's experts by tier, the hot ones first; in a tier layers take turns, so that none goes without."""
    rows = placement.rows_per_rank
    table = placement.physical_to_logical[:, rank * rows : (rank + 1) * rows]
    tiers = placement.tiers[:, rank * rows : (rank + 1) * rows]
    layers, columns = np.nonzero(table != EMPTY)
    order = np.lexsort((layers, columns, tiers[layers, columns]))
    return [ExpertId(int(layers[i]), int(table[layers[i], columns[i]])) for i in order]


def _tiers_in_order(num_slots: int, budget: TierBudget) -> NDArray[np.uint8]:
    """Tiers of a rank's slots, most read first: hot, then warm, cold and disk by what the host bytes allow."""
    tiers = np.full(num_slots, Tier.DISK, np.uint8)
    num_hot = min(num_slots, int(budget.gpu_slots * budget.hot_share))
    if num_slots <= budget.gpu_slots:
        num_hot = num_slots
    tiers[:num_hot] = Tier.HOT
    rest = num_slots - num_hot
    if rest * budget.expert_bytes <= budget.host_bytes:
        num_warm, num_cold = rest, 0
    elif rest * budget.cold_bytes <= budget.host_bytes:
        spare = budget.host_bytes - rest * budget.cold_bytes
        num_warm = int(spare / (budget.expert_bytes - budget.cold_bytes))
        num_cold = rest - num_warm
    else:
        num_warm, num_cold = 0, int(budget.host_bytes / budget.cold_bytes)
    tiers[num_hot : num_hot + num_warm] = Tier.WARM
    tiers[num_hot + num_warm : num_hot + num_warm + num_cold] = Tier.COLD
    return tiers
