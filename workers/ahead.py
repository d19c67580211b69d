"""Fetching ahead: experts that a later layer will probably need go into slots while the link has nothing else to do.

They have a region that is a number, not a place: at most so many slots wait for a use that was foreseen. They land
where the policy would evict first, and stay there when they are used: nothing is copied again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from placement.core import ExpertId
from workers.host_slab import HostSlab
from workers.learner import Learner
from workers.links import Link
from workers.prefetch import LinkRoom
from workers.slots import Slots
from workers.telemetry import CacheCounters

ENOUGH_TO_TELL = 8


class Ahead:
    """share: the region, as a share of the slots. link_bytes_per_s: see `LinkRoom`. serves: whether an expert may be
    fetched; not one that the slab still has, but another thread may drop at any time."""

    def __init__(
        self,
        slots: Slots,
        *,
        slab: HostSlab,
        policy: Learner,
        link: Link,
        counters: CacheCounters,
        share: float,
        link_bytes_per_s: float | None,
        serves: Callable[[ExpertId], bool],
    ) -> None:
        self.wanted = True
        self.region = int(share * len(slots))
        self._slots = slots
        self._slab = slab
        self._policy = policy
        self._link = link
        self._counters = counters
        self._share = share
        self._serves = serves
        self._room = LinkRoom(time.monotonic, link_bytes_per_s)

    def begin_layer(self, layer: int) -> None:
        """The copies of the layers before are all sent for, those of this layer are not."""
        self._room.begin_layer(layer, self._counters.copied_bytes)

    def looks_ahead(self) -> bool:
        """Whether a prefetch would be of use now: not without a link that copies beside the computing and idles, not
        while prefetches are hardly ever used, and not where everything is in slots."""
        slots = self._slots
        if not self.wanted or not self.region or not self._link.overlaps or self._room.left() < slots.blob_bytes:
            return False
        return slots.table.num_filled < slots.num_experts and slots.judge.allows()

    def prefetch(self, layer: int, experts: list[int]) -> None:
        """Send for experts of a layer ahead, the likeliest first, as far as region and link have room. Does nothing
        while the link is busy with an earlier prefetch. Experts of other ranks are left out."""
        table = self._slots.table
        if layer >= self._policy.num_layers or table.is_prefetching():
            return
        places = table.slot_at[layer, experts].tolist()
        absent = [ExpertId(layer, expert) for expert, slot in zip(experts, places, strict=True) if slot < 0]
        absent = [item for item in absent if self._serves(item)]
        room = min(self.region - table.num_foreseen, self._room.left() // self._slots.blob_bytes)
        self._slab.promote([item for item in absent if not self._slab.is_ready(item)])
        ready = [item.expert for item in absent if self._slab.is_ready(item)]
        ready = ready[: int(min(room, len(ready)))]
        free = table.victims(len(ready), sparing=[slot for slot in places if slot >= 0])
        sent: list[int] = []
        try:
            for expert, slot in zip(ready, free, strict=False):
                # One submission each, so that the layer waits for none but those that it turns out to need.
                sent += self._slots.send(layer, [expert], [slot], urgent=False)[1]
        finally:
            if sent:
                table.expect(sent)
                self._counters.prefetched += len(sent)

    def guess(self, layer: int, count: int) -> None:
        """Send for the experts of a layer ahead that are the most likely, given what the last layers chose."""
        if layer < self._policy.num_layers:
            self.prefetch(layer, np.argsort(-self._policy.chances(layer), kind="stable")[:count].tolist())

    def end_layer(self, layer: int) -> None:
        """A layer has run: what was fetched ahead for it and not used was wasted; its slots are like all others now."""
        for slot in self._slots.table.unused(layer):
            self._slots.waste(slot)

    def resized(self, *, keep_region: bool) -> None:
        """There is another number of slots."""
        self.region = int(self._share * len(self._slots)) if keep_region else 0

    def measured(self, num_bytes: int, seconds: float) -> None:
        """Urgent copies alone on the link took so long; of a few experts that says little."""
        if num_bytes > ENOUGH_TO_TELL * self._slots.blob_bytes:
            self._room.bytes_per_s = num_bytes / seconds
