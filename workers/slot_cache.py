"""The slot cache: a fixed array of GPU slots in front of the host slab, one arena for all layers.

What a layer needs comes in waves: what is in slots already first, the missing experts as they land. A slot is *held*
from lookup until its wave is over, and overwritten only behind the fence of its last use. Who makes room is the choice
of the policy (`placement.cache`). When very much is missing, experts stream through two groups of slots, and what the
cache holds stays. Weights are read-only: eviction copies nothing back.

Prefetches have a region of their own that is a number, not a place: at most so many slots wait for a use that was
foreseen. They land where the policy would evict first, and stay there when they are used: nothing is copied again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from placement.cache.finding import by_count
from placement.cache.policy import EvictionPolicy
from placement.core import ExpertId
from workers.host_slab import HostSlab
from workers.links import Link
from workers.memory import CountedMemory, Memory
from workers.prefetch import LinkRoom, PrefetchJudge
from workers.slot_table import Found, SlotTable
from workers.telemetry import CacheCounters

logger = logging.getLogger(__name__)
LANDING_GROUP = 8
ONE_WAVE = 16
STREAM_FROM = 48
PREFETCH_SHARE = 0.125
NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts of one layer that lie in slots at the same time. slots [E + 1]: where they lie; what else it says of
    experts that the layer needs is -1, the last too, for the expert -1. It holds until the next wave."""

    experts: list[int]
    slots: NDArray[np.int64]


class SlotCache:
    """[num_slots, blob_bytes] uint8 on the device. One thread at a time may use it.

    landing_group: experts sent for as one. one_wave: layers that need no more come as one wave, since launching the
    products twice would cost more than they could overlap. stream_from: with so many missing from one layer, they
    stream through two landing groups. prefetch_share: the region of prefetches, as a share of the slots.
    """

    def __init__(
        self,
        *,
        slab: HostSlab,
        policy: EvictionPolicy,
        link: Link,
        num_slots: int,
        blob_bytes: int,
        device: torch.device,
        landing_group: int = LANDING_GROUP,
        one_wave: int = ONE_WAVE,
        stream_from: int = STREAM_FROM,
        prefetch_share: float = PREFETCH_SHARE,
        memory: Memory | None = None,
    ) -> None:
        self.counters = CacheCounters(stream_from=stream_from)
        self.generation = 0
        self._slab = slab
        self._policy = policy
        self._link = link
        self._blob_bytes = blob_bytes
        self._device = device
        self._memory = CountedMemory() if memory is None else memory
        self._landing_group = landing_group
        self._one_wave = one_wave
        self._stream_from = stream_from
        self._prefetch_share = prefetch_share
        self._judge = PrefetchJudge()
        self._room = LinkRoom(time.monotonic)
        self._lost: list[int] = []
        self._tables: torch.Tensor | None = None
        self.prefetching = True
        self._allocate_most(num_slots, num_slots)

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def num_bytes(self) -> int:
        return self.slots.numel()

    def resident(self, layer: int) -> frozenset[int]:
        """The experts of a layer that lie in slots now, or are on their way there."""
        return frozenset(self._table.in_layer(layer))

    def whole_table(self, layer: int) -> torch.Tensor | None:
        """[E] the slots of a layer's experts, on the device, if all experts of all layers are in slots; else None."""
        table = self._table
        if table.num_filled < self._policy.num_layers * self._policy.num_experts:
            return None
        if self._tables is None:
            if any(arrival is not None for arrival in table.arrival):
                return None
            self._tables = torch.from_numpy(table.slot_at[:, :-1].copy()).to(self._device)
        return self._tables[layer]

    # ----------------------------------------------------------------------------------------------------- demand

    def waves(self, layer: int, chosen: NDArray[np.int64], foreseen: NDArray[np.int64] = NOTHING) -> Generator[Wave]:
        """Bring a step's experts through the slots. chosen [n]: their ids, -1 for one that is not here. The host slab
        must own every one; those that it can't read are in no wave (`take_lost`). foreseen [m]: ids that a router asked
        ahead gave for the next layer.

        What the caller computes with a wave must be under way when it asks for the next. The policy learns and what is
        foreseen is sent for while a GPU computes; where computing is not deferred that comes first.
        """
        table = self._table
        found = table.look_up(layer, chosen)
        self.counters.look_up(len(found.needed), len(found.hits))
        missing = deque(found.missing)
        hits, late = self._split_late(layer, found) if found.stirring else (found.hits, [])
        landing: deque[list[int]] = deque([late] if late else [])
        try:
            free: deque[int] = deque()
            if missing:
                free.extend(table.victims(self._room_for(len(missing))))
                landing += self._submit(layer, missing, free)
            first = hits
            if landing and len(found.needed) <= self._one_wave and not missing:
                first = [*hits, *(expert for group in landing for expert in group)]
                landing.clear()
            whole = not missing and not landing
            learned = not (first and self._link.defers)
            if learned:
                self._learn(layer, found, foreseen)
            if first:
                slots = self._use(layer, first, stirring=found.stirring or bool(found.missing))
                yield self._wave(layer, first, slots, whole=whole)
                table.release(slots, self._link.fence())
            if not learned:
                self._learn(layer, found, foreseen)
            while missing or landing:
                if not landing:
                    free.extend(table.victims(len(missing)))
                    landing += self._submit(layer, missing, free)
                    if not landing:
                        # None of them could be read.
                        continue
                group = landing.popleft()
                slots = self._use(layer, group, stirring=True)
                yield self._wave(layer, group, slots, whole=False)
                table.release(slots, self._link.fence())
                if missing:
                    free.extend(slots)
                    landing += self._submit(layer, missing, free)
            # While the device computes: who makes room for what the next layer will miss?
            if found.missing:
                table.rank_ahead(len(found.needed))
            self._judge_unused(layer)
        finally:
            # A caller that broke off leaves copies under way into slots that are free for others from now on.
            for group in landing:
                self._use(layer, group, stirring=True)
            table.held[:] = False

    def _split_late(self, layer: int, found: Found) -> tuple[list[int], list[int]]:
        """The hits that are there, and those that are still landing."""
        row = self._table.slot_at[layer]
        late = [expert for expert in found.hits if self._table.is_landing(row[expert])]
        return [expert for expert in found.hits if expert not in late], late

    def _learn(self, layer: int, found: Found, foreseen: NDArray[np.int64]) -> None:
        self._policy.observe(layer, found.needed)
        if len(foreseen):
            self.prefetch(layer + 1, by_count(foreseen, self._policy.num_experts).tolist())

    def _wave(self, layer: int, experts: list[int], slots: list[int], *, whole: bool) -> Wave:
        """whole: no other expert that the layer needs lies in a slot, so that the table itself says where."""
        if whole:
            return Wave(experts, self._table.slot_at[layer])
        places = np.full(self._policy.num_experts + 1, -1, np.int64)
        places[experts] = slots
        return Wave(experts, places)

    def _room_for(self, num_missing: int) -> int:
        if num_missing < self._stream_from:
            return num_missing
        self.counters.streamed_layers += 1
        return 2 * self._landing_group

    def _submit(self, layer: int, missing: deque[int], free: deque[int]) -> deque[list[int]]:
        """Send for as many missing experts as there are free slots, group by group, each group one submission."""
        groups: deque[list[int]] = deque()
        while missing and free:
            group = [missing.popleft() for _ in range(min(self._landing_group, len(missing), len(free)))]
            sent, slots = self._send(layer, group, [free.popleft() for _ in group], urgent=True)
            if sent:
                self._table.hold(slots)
                groups.append(sent)
        return groups

    def _send(self, layer: int, experts: list[int], slots: list[int], *, urgent: bool) -> tuple[list[int], list[int]]:
        """Send for experts. Returns those that are on their way, and where to; the others can't be read."""
        items = [ExpertId(layer, expert) for expert in experts]
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
        newest = self._table.last_use(slots)
        for slot in slots:
            self._empty(slot)
        arrival = self._link.copy(pairs, after=newest, urgent=urgent)
        self._slab.lent(items, arrival)
        self._table.place(layer, experts, slots, arrival)
        self.counters.copies += len(items)
        self.counters.copied_bytes += len(items) * self._blob_bytes
        return experts, slots

    def take_lost(self) -> list[int]:
        """The experts that the waves of the last layer lacked, since they can't be read."""
        lost, self._lost = self._lost, []
        return lost

    def _use(self, layer: int, experts: list[int], *, stirring: bool) -> list[int]:
        """Wait for what has not arrived. stirring: there may be something to be done. Returns their slots."""
        table = self._table
        slots: list[int] = table.slot_at[layer, experts].tolist()
        if not stirring:
            return slots
        busy = [slot for slot in slots if table.stirring[slot]]
        arrivals = {id(arrival): arrival for slot in busy if (arrival := table.arrival[slot]) is not None}
        if arrivals:
            begun = time.perf_counter()
            for arrival in arrivals.values():
                arrival.wait()
            self.counters.stall_s += time.perf_counter() - begun
        for slot in busy:
            table.arrived(slot)
            if table.foreseen[slot]:
                table.fulfil(slot)
                self._judge.used()
                self.counters.prefetch_used += 1
        return slots

    def _empty(self, slot: int) -> None:
        if not self._table.empty(slot):
            return
        self._tables = None
        self.counters.evictions += 1
        if self._table.foreseen[slot]:
            self._waste(slot)

    def forget(self, expert: ExpertId) -> None:
        """Drop an expert that this rank no longer owns."""
        slot = self._table.slot_of(expert)
        if slot is None:
            return
        arrival = self._table.arrival[slot]
        if arrival is not None:
            # Its blob may be released next: the copy must not read a row that another expert has got.
            arrival.finish()
            self._table.arrived(slot)
        self._empty(slot)
        self.counters.evictions -= 1

    def let_go(self) -> None:
        """No step is under way: hold nothing."""
        self._table.held[:] = False

    # --------------------------------------------------------------------------------------------------- prefetching

    def looks_ahead(self) -> bool:
        """Whether a prefetch would be of use now: not without a link that copies beside the computing, not while
        prefetches are hardly ever used, and not where everything is in slots."""
        if not self.prefetching or not self._prefetch_slots or not self._link.overlaps:
            return False
        return self._table.num_filled < self._policy.num_layers * self._policy.num_experts and self._judge.allows()

    def prefetch(self, layer: int, experts: list[int]) -> None:
        """Send for experts that a layer ahead will probably need, the likeliest first, as far as region and link have
        room. Does nothing while the link is busy with an earlier prefetch. Experts of other ranks are left out."""
        table = self._table
        left = self._room.left(self.counters.copied_bytes - self.counters.prefetched * self._blob_bytes)
        if layer >= self._policy.num_layers or table.is_prefetching():
            return
        places = table.slot_at[layer, experts].tolist()
        absent = [ExpertId(layer, expert) for expert, slot in zip(experts, places, strict=True) if slot < 0]
        absent = [item for item in absent if self._slab.holds(item)]
        room = min(self._prefetch_slots - table.num_foreseen, left // self._blob_bytes)
        self._slab.promote([item for item in absent if not self._slab.is_ready(item)])
        ready = [item.expert for item in absent if self._slab.is_ready(item)]
        ready = ready[: int(min(room, len(ready)))]
        slots = table.victims(len(ready), sparing=[slot for slot in places if slot >= 0])
        sent: list[int] = []
        for expert, slot in zip(ready, slots, strict=False):
            # One submission each, so that the layer waits for none but those that it turns out to need.
            sent += self._send(layer, [expert], [slot], urgent=False)[1]
        if sent:
            table.expect(sent)
            self.counters.prefetched += len(sent)

    def _judge_unused(self, layer: int) -> None:
        """A layer has run: what was fetched ahead for it and not used was wasted; its slots are like all others now."""
        for slot in self._table.unused(layer):
            self._waste(slot)

    def _waste(self, slot: int) -> None:
        self._table.fulfil(slot)
        self._judge.wasted()
        self.counters.prefetch_wasted_bytes += self._blob_bytes

    def likely(self, layer: int, count: int) -> list[int]:
        """The experts of a layer that the policy's model of reuse thinks most likely, given what ran last."""
        chances = self._policy.chances(layer)
        return [int(expert) for expert in np.argsort(-chances)[:count]]

    # -------------------------------------------------------------------------------------------------------- memory

    def warm_up(self, hottest: list[ExpertId]) -> None:
        """Fill empty slots, the hottest experts first, and wait until they are there."""
        table, here = self._table, self._slab.experts()
        absent = [item for item in hottest if item in here and table.slot_of(item) is None]
        items = [item for item in absent if self._slab.is_ready(item)]
        slots = table.vacant()[: len(items)]
        begun = time.perf_counter()
        for item, slot in zip(items, slots, strict=False):
            self._send(item.layer, [item.expert], [slot], urgent=True)
        self._lost.clear()
        for slot in slots:
            arrival = table.arrival[slot]
            if arrival is not None:
                arrival.finish()
                table.arrived(slot)
        if len(slots) > self._landing_group:
            self._room.bytes_per_s = len(slots) * self._blob_bytes / (time.perf_counter() - begun)

    def resize(self, num_slots: int, *, prefetch: bool = True) -> None:
        """Have so many slots from now on, with the most valuable of what was in them; prefetch: and a region for it.

        Memory of the old ones goes back first; where it does not suffice the new ones are fewer. Nothing may be held.
        """
        assert not self._table.held.any()
        for arrival in self._table.arrival:
            if arrival is not None:
                arrival.finish()
        kept = self._table.by_value()
        self.counters.resizes += 1
        self.generation += 1
        before = self.num_slots
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Layers have views of the old slots until they next run.
        self._rows.clear()
        self.slots.untyped_storage().resize_(0)
        self._memory.claim("slots", 0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._allocate_most(num_slots, before)
        self._prefetch_slots = int(self._prefetch_share * self.num_slots) if prefetch else 0
        self.warm_up(kept)

    def _allocate_most(self, wanted: int, before: int) -> None:
        """So many slots as wanted; as many as before where there is no room for more; half, a quarter, ... of that."""
        num_slots = wanted
        while True:
            try:
                self._allocate(num_slots)
                break
            except torch.OutOfMemoryError:
                if num_slots == 1:
                    raise
            num_slots = before if num_slots > before else num_slots // 2
        if num_slots < wanted:
            logger.warning("memory has no room for %d slots of the expert cache; there are %d", wanted, num_slots)

    @property
    def prefetch_slots(self) -> int:
        """The size of the region of prefetches."""
        return self._prefetch_slots

    @property
    def blob_bytes(self) -> int:
        """The size of one slot."""
        return self._blob_bytes

    def close(self) -> None:
        self._link.close()

    def _allocate(self, num_slots: int) -> None:
        self._memory.claim("slots", num_slots * self._blob_bytes)
        self.slots = torch.zeros((num_slots, self._blob_bytes), dtype=torch.uint8, device=self._device)
        self._rows = list(self.slots.unbind())
        self._table = SlotTable(num_slots, self._policy)
        self._prefetch_slots = int(self._prefetch_share * num_slots)
        self._tables = None
