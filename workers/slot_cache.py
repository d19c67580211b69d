"""The slot cache: a fixed array of GPU slots in front of the host slab.

Each layer has an arena of equal size, kept by least recent use. (One arena for all layers would be scanned in a cycle,
layer after layer, and never hit once it is smaller than the model's working set.) A slot is held from lookup until its
GEMM is done, and a held slot is never overwritten. Weights are read-only: eviction copies nothing back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from placement.core import ExpertId
from workers.host_slab import HostSlab


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """How often an expert that a step needed was in a slot already, and what was copied and evicted."""

    lookups: int = 0
    hits: int = 0
    copies: int = 0
    copied_bytes: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Experts of one layer that lie in slots at the same time. slot_of maps expert -> index in the layer's arena."""

    slot_of: dict[int, int]


class SlotCache:
    """slots: uint8 [L * slots_per_layer, blob_bytes] on device, allocated once."""

    def __init__(
        self, *, slab: HostSlab, num_layers: int, slots_per_layer: int, blob_bytes: int, device: torch.device
    ) -> None:
        self._slab = slab
        self._slots_per_layer = slots_per_layer
        self._slots = torch.zeros((num_layers * slots_per_layer, blob_bytes), dtype=torch.uint8, device=device)
        self._used: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(num_layers)]
        self._free = [list(range(slots_per_layer - 1, -1, -1)) for _ in range(num_layers)]
        self._held: list[set[int]] = [set() for _ in range(num_layers)]
        self.counters = CacheCounters()

    @property
    def num_bytes(self) -> int:
        return self._slots.numel()

    def arena(self, layer: int) -> torch.Tensor:
        """[slots_per_layer, blob_bytes]: the slots of one layer."""
        start = layer * self._slots_per_layer
        return self._slots[start : start + self._slots_per_layer]

    def resident(self, layer: int) -> frozenset[int]:
        """The experts of a layer that lie in slots now."""
        return frozenset(self._used[layer])

    def waves(self, layer: int, experts: list[int]) -> Iterator[Wave]:
        """Bring a step's experts through the arena: what is there first, then the missing ones, as many as fit at once.

        The slots of a wave are held until the next wave is asked for. Every expert must be in the host slab.
        """
        used = self._used[layer]
        hits = [expert for expert in experts if expert in used]
        misses = [expert for expert in experts if expert not in used]
        self.counters.lookups += len(experts)
        self.counters.hits += len(hits)
        for expert in hits:
            used.move_to_end(expert)
        if hits:
            yield from self._hold(layer, hits)
        for start in range(0, len(misses), self._slots_per_layer):
            wave = misses[start : start + self._slots_per_layer]
            self._held[layer].update(wave)
            for expert in wave:
                self._fetch(layer, expert)
            yield from self._hold(layer, wave)

    def forget(self, expert: ExpertId) -> None:
        """Drop an expert that this rank no longer owns."""
        slot = self._used[expert.layer].pop(expert.expert, None)
        if slot is not None:
            self._free[expert.layer].append(slot)

    def let_go(self) -> None:
        """No step is under way: hold nothing."""
        for held in self._held:
            held.clear()

    def _hold(self, layer: int, experts: list[int]) -> Iterator[Wave]:
        self._held[layer].update(experts)
        try:
            yield Wave(slot_of={expert: self._used[layer][expert] for expert in experts})
        finally:
            self._held[layer].difference_update(experts)

    def _fetch(self, layer: int, expert: int) -> None:
        blob = self._slab.blob(ExpertId(layer, expert))
        slot = self._free[layer].pop() if self._free[layer] else self._evict(layer)
        self.arena(layer)[slot].copy_(blob, non_blocking=True)
        self._used[layer][expert] = slot
        self.counters.copies += 1
        self.counters.copied_bytes += blob.numel()

    def _evict(self, layer: int) -> int:
        victim = next(expert for expert in self._used[layer] if expert not in self._held[layer])
        self.counters.evictions += 1
        return self._used[layer].pop(victim)
