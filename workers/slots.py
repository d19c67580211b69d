"""Slots on a device: one array for the experts of all layers, what lies in them, and the copies into them.

Weights are read-only: what makes room is not copied back.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from placement.core import ExpertId
from workers.host_slab import HostSlab
from workers.learner import Learner
from workers.links import NOTHING_UNDER_WAY, Arrival, Link, is_settled_well
from workers.memory import Memory
from workers.prefetch import PrefetchJudge
from workers.slot_array import SlotArray
from workers.slot_table import SlotTable
from workers.telemetry import CacheCounters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Whole:
    """A layer whose experts all lie in slots, from `start` on and before `stop`. slots [E]: where, on the device;
    inside [E]: how far from `start`."""

    slots: torch.Tensor
    inside: torch.Tensor
    start: int
    stop: int


class Slots:
    """[num_slots, blob_bytes] uint8 on the device, fewer where memory has no room for so many.

    generation: counts the arrays; whoever has views of an older one must make them anew.
    """

    def __init__(
        self,
        *,
        slab: HostSlab,
        policy: Learner,
        link: Link,
        num_slots: int,
        blob_bytes: int,
        device: torch.device,
        memory: Memory,
        counters: CacheCounters,
    ) -> None:
        self.blob_bytes = blob_bytes
        self.generation = 0
        self.judge = PrefetchJudge()
        self._slab = slab
        self._policy = policy
        self._link = link
        self._device = device
        self._counters = counters
        self._lost: list[int] = []
        # To make one takes as long as to look up where it lies.
        self._items = [
            [ExpertId(layer, expert) for expert in range(policy.num_experts)] for layer in range(policy.num_layers)
        ]
        self._whole: list[Whole] | None = None
        self._slots = SlotArray(num_slots, blob_bytes=blob_bytes, device=device, memory=memory)
        self._begin_anew()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def array(self) -> torch.Tensor:
        """[num_slots, blob_bytes]; another one after each resize."""
        return self._slots.whole

    @property
    def num_experts(self) -> int:
        """Of all layers."""
        return self._policy.num_layers * self._policy.num_experts

    def whole(self, layer: int) -> Whole | None:
        """Where a layer's experts lie, if all experts of all layers are in slots."""
        table = self.table
        if table.num_filled < self.num_experts:
            return None
        if self._whole is None:
            if any(arrival is not None for arrival in table.arrival):
                return None
            here = table.slot_at[:, :-1]
            starts, stops = here.min(axis=1), here.max(axis=1) + 1
            there = torch.from_numpy(here.copy()).to(self._device)
            inside = there - torch.from_numpy(starts).to(self._device).unsqueeze(1)
            self._whole = [Whole(*found) for found in zip(there, inside, starts.tolist(), stops.tolist(), strict=True)]
        return self._whole[layer]

    # ----------------------------------------------------------------------------------------------------- copies

    def send(self, layer: int, experts: list[int], slots: list[int], *, urgent: bool) -> tuple[list[int], list[int]]:
        """Send for experts. Returns those that are on their way, and where to; the others can't be read."""
        of_layer = self._items[layer]
        items = [of_layer[expert] for expert in experts]
        fetched = self._slab.fetch(items)
        blobs = [blob for blob in fetched if blob is not None]
        if len(blobs) < len(items):
            if urgent:
                self._lost += [expert for expert, blob in zip(experts, fetched, strict=True) if blob is None]
            items = [item for item, blob in zip(items, fetched, strict=True) if blob is not None]
            experts, slots = [item.expert for item in items], slots[: len(items)]
            if not items:
                return experts, slots
        pairs = [(self._rows[slot], blob) for slot, blob in zip(slots, blobs, strict=True)]
        try:
            arrival = self._link.copy(pairs, after=self.table.last_use(slots, self._link.fence), urgent=urgent)
        except BaseException:
            # Some may have been copied.
            for slot in slots:
                self._abandon(slot)
            self._slab.lent(items, NOTHING_UNDER_WAY)
            raise
        # The copies are what the layer waits for: all else comes after they were given.
        for slot in slots:
            self.empty(slot)
        self._slab.lent(items, arrival)
        self.table.place(layer, experts, slots, arrival)
        self._counters.copies += len(items)
        self._counters.copied_bytes += len(items) * self.blob_bytes
        return experts, slots

    def take_lost(self) -> list[int]:
        """The experts that were sent for since the last call, urgently, and can't be read."""
        lost, self._lost = self._lost, []
        return lost

    def use(self, layer: int, experts: list[int], *, stirring: bool) -> list[int]:
        """Wait for what has not arrived. stirring: there may be something to be done. Returns their slots."""
        table = self.table
        slots: list[int] = table.slot_at[layer, experts].tolist()
        if not stirring:
            return slots
        busy = [slot for slot in slots if table.stirring[slot]]
        arrivals = {id(arrival): arrival for slot in busy if (arrival := table.arrival[slot]) is not None}
        if arrivals:
            begun = time.perf_counter()
            table.awaited += arrivals.values()
            for arrival in arrivals.values():
                try:
                    arrival.wait()
                except RuntimeError:
                    self._drop(arrival)
                    raise
            self._counters.stall_s += time.perf_counter() - begun
        for slot in busy:
            table.arrived(slot)
            if table.foreseen[slot]:
                table.fulfil(slot)
                self.judge.used()
                self._counters.prefetch_used += 1
        return slots

    def let_go(self) -> None:
        """A layer is broken off, or no step is under way: hold nothing. What is computed from now on comes after all
        that is on its way into what was held, so that no later copy overtakes it."""
        table = self.table
        for slot in table.all_held():
            arrival = table.arrival[slot]
            if arrival is not None:
                table.awaited.append(arrival)
                try:
                    arrival.wait()
                except RuntimeError:
                    self._drop(arrival)
        table.let_go()

    def _drop(self, arrival: Arrival) -> None:
        """What was on its way failed: nobody is to find it."""
        is_settled_well(arrival)
        for slot, other in enumerate(self.table.arrival):
            if other is arrival:
                self._abandon(slot)

    def _abandon(self, slot: int) -> None:
        """Let a slot go whose contents are not what they should be, or are of no use any more."""
        self.table.arrived(slot)
        before = self._counters.evictions
        self.empty(slot)
        self._counters.evictions = before

    def empty(self, slot: int) -> None:
        """Let what lies in a slot go."""
        if not self.table.empty(slot):
            return
        self._whole = None
        self._counters.evictions += 1
        if self.table.foreseen[slot]:
            self.waste(slot)

    def waste(self, slot: int) -> None:
        """What was fetched ahead into this slot was not used."""
        self.table.fulfil(slot)
        self.judge.wasted()
        self._counters.prefetch_wasted_bytes += self.blob_bytes

    def forget(self, expert: ExpertId) -> None:
        """Drop an expert that this rank no longer owns."""
        # Its blob may be released next: no copy, even into a slot that holds something else by now, must read a row
        # that another expert has got.
        self._settle_awaited()
        slot = self.table.slot_of(expert)
        if slot is None:
            return
        arrival = self.table.arrival[slot]
        if arrival is not None:
            is_settled_well(arrival)
        self._abandon(slot)

    def _settle_awaited(self) -> None:
        for arrival in self.table.awaited:
            is_settled_well(arrival)
        self.table.awaited = []

    def fill(self, hottest: list[ExpertId]) -> tuple[int, float]:
        """Fill empty slots, with the hottest experts where not all have room, and wait until they are there. Returns
        the bytes, and the seconds that they took.

        Those of a layer lie side by side, so that one that is here whole can be computed by itself.
        """
        table, here = self.table, self._slab.experts()
        absent = [item for item in hottest if item in here and table.slot_of(item) is None]
        vacant = table.vacant()
        items = sorted([item for item in absent if self._slab.is_ready(item)][: len(vacant)])
        slots = vacant[: len(items)]
        begun = time.perf_counter()
        try:
            for item, slot in zip(items, slots, strict=True):
                self.send(item.layer, [item.expert], [slot], urgent=True)
        finally:
            # No layer needs them.
            self._lost.clear()
        for slot in slots:
            arrival = table.arrival[slot]
            if arrival is None:
                continue
            if is_settled_well(arrival):
                table.arrived(slot)
            else:
                self._drop(arrival)
                logger.warning("an expert was lost on its way into a slot: it is fetched anew when it is needed")
        return len(slots) * self.blob_bytes, time.perf_counter() - begun

    def resize(self, num_slots: int) -> None:
        """Have so many slots from now on, with the most valuable of what was in them (see `SlotArray.replace`). Nothing
        may be held."""
        assert not self.table.held.any()
        self._settle_awaited()
        for arrival in self.table.arrival:
            if arrival is not None:
                is_settled_well(arrival)
        kept = self.table.by_value()
        self.generation += 1
        self._slots.replace(num_slots)
        self._begin_anew()
        self.fill(kept)

    def _begin_anew(self) -> None:
        """There is nothing in the slots."""
        self._rows = self._slots.rows
        self.table = SlotTable(len(self), self._policy)
        self._whole = None
