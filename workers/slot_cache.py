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

from placement.cache.policy import EvictionPolicy
from placement.core import ExpertId
from workers.host_slab import HostSlab
from workers.links import Link
from workers.memory import CountedMemory, Memory
from workers.prefetch import LinkRoom, PrefetchJudge
from workers.slot_table import SlotTable
from workers.telemetry import CacheCounters

logger = logging.getLogger(__name__)
LANDING_GROUP = 8
ONE_WAVE = 16
STREAM_FROM = 48
PREFETCH_SHARE = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Experts of one layer that lie in slots at the same time. slot_of maps expert -> slot."""

    slot_of: dict[int, int]


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
        self._lost: list[ExpertId] = []
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
        return frozenset(item.expert for item in self._table.slot_of if item.layer == layer)

    def whole_table(self, layer: int) -> torch.Tensor | None:
        """[E] the slots of a layer's experts, on the device, if all experts of all layers are in slots; else None."""
        shape = self._policy.history.last.shape
        slot_of = self._table.slot_of
        if len(slot_of) < shape[0] * shape[1]:
            return None
        if self._tables is None:
            if any(arrival is not None for arrival in self._table.arrival):
                return None
            slots = [[slot_of[ExpertId(row, expert)] for expert in range(shape[1])] for row in range(shape[0])]
            self._tables = torch.tensor(slots, device=self._device)
        return self._tables[layer]

    # ----------------------------------------------------------------------------------------------------- demand

    def waves(self, layer: int, experts: list[int]) -> Generator[Wave]:
        """Bring a step's distinct experts through the slots. The host slab must own every one; those that it can't
        read are in no wave (`take_lost`).

        What the caller computes with a wave must be under way when it asks for the next.
        """
        table, slot_of = self._table, self._table.slot_of
        needed = [ExpertId(layer, expert) for expert in experts]
        hits = [item for item in needed if item in slot_of]
        missing = deque(item for item in needed if item not in slot_of)
        self.counters.look_up(len(needed), len(hits))
        table.hold([slot_of[item] for item in hits])
        late = [item for item in hits if table.is_landing(slot_of[item])]
        landing: deque[list[ExpertId]] = deque([late] if late else [])
        try:
            free = deque(table.victims(self._room_for(len(missing))))
            landing += self._submit(missing, free)
            # After the copies are under way, since they are what the layer waits for.
            self._policy.observe(layer, np.array(experts, np.int64))
            first = [item for item in hits if item not in late]
            if len(needed) <= self._one_wave and not missing:
                first = [*first, *(item for group in landing for item in group)]
                landing.clear()
            if first:
                yield self._use(first)
                table.release([slot_of[item] for item in first], self._link.fence())
            while missing or landing:
                if not landing:
                    free.extend(table.victims(len(missing)))
                    landing += self._submit(missing, free)
                    if not landing:
                        # None of them could be read.
                        continue
                group = landing.popleft()
                yield self._use(group)
                slots = [slot_of[item] for item in group]
                table.release(slots, self._link.fence())
                if missing:
                    free.extend(slots)
                    landing += self._submit(missing, free)
            # While the device computes: who makes room for what the next layer will miss?
            if len(hits) < len(needed):
                table.rank_ahead(len(needed))
            self._judge_unused(layer)
        finally:
            # A caller that broke off leaves copies under way into slots that are free for others from now on.
            for group in landing:
                self._use(group)
            table.held[:] = False

    def _room_for(self, num_missing: int) -> int:
        if num_missing < self._stream_from:
            return num_missing
        self.counters.streamed_layers += 1
        return 2 * self._landing_group

    def _submit(self, missing: deque[ExpertId], free: deque[int]) -> deque[list[ExpertId]]:
        """Send for as many missing experts as there are free slots, group by group, each group one submission."""
        groups: deque[list[ExpertId]] = deque()
        while missing and free:
            group = [missing.popleft() for _ in range(min(self._landing_group, len(missing), len(free)))]
            sent, slots = self._send(group, [free.popleft() for _ in group], urgent=True)
            if sent:
                self._table.hold(slots)
                groups.append(sent)
        return groups

    def _send(self, items: list[ExpertId], slots: list[int], *, urgent: bool) -> tuple[list[ExpertId], list[int]]:
        """Send for experts. Returns those that are on their way, and where to; the others can't be read."""
        blobs = self._slab.fetch(items)
        if None in blobs:
            if urgent:
                self._lost += [item for item, blob in zip(items, blobs, strict=True) if blob is None]
            items = [item for item, blob in zip(items, blobs, strict=True) if blob is not None]
            slots = slots[: len(items)]
            if not items:
                return items, slots
        newest = self._table.last_use(slots)
        for slot in slots:
            self._empty(slot)
        here = (blob for blob in blobs if blob is not None)
        pairs = [(self.slots[slot], blob) for slot, blob in zip(slots, here, strict=True)]
        arrival = self._link.copy(pairs, after=newest, urgent=urgent)
        self._slab.lent(items, arrival)
        self._table.place(items, slots, arrival)
        self.counters.copies += len(items)
        self.counters.copied_bytes += len(items) * self._blob_bytes
        return items, slots

    def take_lost(self) -> list[int]:
        """The experts that the waves of the last layer lacked, since they can't be read."""
        lost, self._lost = self._lost, []
        return [item.expert for item in lost]

    def _use(self, items: list[ExpertId]) -> Wave:
        table = self._table
        slots = [table.slot_of[item] for item in items]
        arrivals = {id(arrival): arrival for slot in slots if (arrival := table.arrival[slot]) is not None}
        for arrival in arrivals.values():
            with self.counters.stalled():
                arrival.wait()
        for slot in slots:
            table.arrival[slot] = None
            if table.foreseen[slot]:
                table.foreseen[slot] = False
                self._judge.used()
                self.counters.prefetch_used += 1
        return Wave(slot_of={item.expert: slot for item, slot in zip(items, slots, strict=True)})

    def _empty(self, slot: int) -> None:
        if self._table.empty(slot) is None:
            return
        self._tables = None
        self.counters.evictions += 1
        if self._table.foreseen[slot]:
            self._waste(slot)

    def forget(self, expert: ExpertId) -> None:
        """Drop an expert that this rank no longer owns."""
        slot = self._table.slot_of.get(expert)
        if slot is None:
            return
        arrival = self._table.arrival[slot]
        if arrival is not None:
            # Its blob may be released next: the copy must not read a row that another expert has got.
            arrival.finish()
            self._table.arrival[slot] = None
        self._empty(slot)
        self.counters.evictions -= 1

    def let_go(self) -> None:
        """No step is under way: hold nothing."""
        self._table.held[:] = False

    # --------------------------------------------------------------------------------------------------- prefetching

    def looks_ahead(self) -> bool:
        """Whether a prefetch would be of use now: not without a link that copies beside the computing, not while
        prefetches are hardly ever used, and not where everything is in slots."""
        slots = self._prefetch_slots if self.prefetching and self._link.overlaps else 0
        return slots > 0 and len(self._table.slot_of) < self._policy.history.last.size and self._judge.allows()

    def prefetch(self, layer: int, experts: list[int]) -> None:
        """Send for experts that a layer ahead will probably need, the likeliest first, as far as region and link have
        room. Does nothing while the link is busy with an earlier prefetch. Experts of other ranks are left out."""
        table = self._table
        left = self._room.left(self.counters.copied_bytes - self.counters.prefetched * self._blob_bytes)
        if table.is_prefetching():
            return
        items = [ExpertId(layer, expert) for expert in experts]
        absent = [item for item in items if item not in table.slot_of and self._slab.holds(item)]
        room = min(self._prefetch_slots - int(table.foreseen.sum()), left // self._blob_bytes)
        self._slab.promote([item for item in absent if not self._slab.is_ready(item)])
        absent = [item for item in absent if self._slab.is_ready(item)]
        absent = absent[: int(min(room, len(absent)))]
        slots = table.victims(len(absent), sparing=[table.slot_of[item] for item in items if item in table.slot_of])
        sent: list[int] = []
        for item, slot in zip(absent, slots, strict=False):
            # One submission each, so that the layer waits for none but those that it turns out to need.
            sent += self._send([item], [slot], urgent=False)[1]
        if sent:
            table.expect(sent)
            self.counters.prefetched += len(sent)

    def _judge_unused(self, layer: int) -> None:
        """A layer has run: what was fetched ahead for it and not used was wasted; its slots are like all others now."""
        for slot in self._table.unused(layer):
            self._waste(slot)

    def _waste(self, slot: int) -> None:
        self._table.foreseen[slot] = False
        self._judge.wasted()
        self.counters.prefetch_wasted_bytes += self._blob_bytes

    def likely(self, layer: int, count: int) -> list[int]:
        """The experts of a layer that the policy's model of reuse thinks most likely, given what ran last."""
        chances = self._policy.chances(layer)
        return [int(expert) for expert in np.argsort(-chances)[:count]]

    # -------------------------------------------------------------------------------------------------------- memory

    def warm_up(self, hottest: list[ExpertId]) -> None:
        """Fill empty slots, the hottest experts first, and wait until they are there."""
        here = self._slab.experts()
        absent = [item for item in hottest if item in here and item not in self._table.slot_of]
        items = [item for item in absent if self._slab.is_ready(item)]
        slots = self._table.vacant()[: len(items)]
        begun = time.perf_counter()
        for start in range(0, len(slots), self._landing_group):
            part = slots[start : start + self._landing_group]
            self._send(items[start : start + len(part)], part, urgent=True)
        self._lost.clear()
        for slot in slots:
            arrival = self._table.arrival[slot]
            if arrival is not None:
                arrival.finish()
                self._table.arrival[slot] = None
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
        self._table = SlotTable(num_slots, self._policy)
        self._prefetch_slots = int(self._prefetch_share * num_slots)
        self._tables = None
