"""The slot cache: a fixed array of GPU slots in front of the host slab, one arena for all layers.

What a layer needs comes in waves: what is in slots already first, the missing experts as they land. A slot is *held*
from lookup until its wave is over, and overwritten only behind the fence of its last use. Who makes room is the choice
of the policy (`placement.cache`). When very much is missing, experts stream through two groups of slots, and what the
cache holds stays. The slots themselves are `slots.py`, what is fetched ahead of its layer `ahead.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import numpy as np
import torch
from numpy.typing import NDArray

from placement.cache.policy import EvictionPolicy
from placement.core import ExpertId
from workers.afterwards import Afterwards
from workers.ahead import Ahead
from workers.host_slab import HostSlab
from workers.links import Link
from workers.memory import CountedMemory, Memory
from workers.slots import Slots, Whole
from workers.telemetry import CacheCounters
from workers.wave import Group, Stage, Wave, grouped, staged

LANDING_GROUP = 8
ONE_WAVE = 16
STREAM_FROM = 48
PREFETCH_SHARE = 0.125
NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)


class SlotCache:
    """[num_slots, blob_bytes] uint8 on the device. One thread at a time may use it.

    landing_group: experts sent for as one. one_wave: layers that need no more come as one wave, since launching the
    products twice would cost more than they could overlap. stream_from: with so many missing from one layer, they
    stream through two landing groups. prefetch_share: the region of prefetches, as a share of the slots.
    link_bytes_per_s: what prefetches may count on; measured at the warm-up unless given (see `prefetch.LinkRoom`).
    guesses: fetch ahead by the policy's model of reuse, since there is no router to ask. serves: whether an expert may
    be fetched ahead (see `Ahead`); all that the slab holds unless given.
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
        link_bytes_per_s: float | None = None,
        guesses: bool = False,
        memory: Memory | None = None,
        serves: Callable[[ExpertId], bool] | None = None,
    ) -> None:
        self.counters = CacheCounters(stream_from=stream_from)
        self._policy = policy
        self._link = link
        self._landing_group = landing_group
        self._one_wave = one_wave
        self._stream_from = stream_from
        self._slots = Slots(
            slab=slab,
            policy=policy,
            link=link,
            num_slots=num_slots,
            blob_bytes=blob_bytes,
            device=device,
            memory=CountedMemory() if memory is None else memory,
            counters=self.counters,
        )
        self.ahead = Ahead(
            self._slots,
            slab=slab,
            policy=policy,
            link=link,
            counters=self.counters,
            share=prefetch_share,
            link_bytes_per_s=link_bytes_per_s,
            serves=slab.holds if serves is None else serves,
        )
        self._afterwards = Afterwards(self._slots, policy, self.ahead, guesses=guesses)

    @property
    def slots(self) -> torch.Tensor:
        """[num_slots, blob_bytes]; another tensor after each resize."""
        return self._slots.array

    @property
    def generation(self) -> int:
        """Counts the resizes."""
        return self._slots.generation

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def blob_bytes(self) -> int:
        """The size of one slot."""
        return self._slots.blob_bytes

    @property
    def num_bytes(self) -> int:
        return len(self._slots) * self.blob_bytes

    def resident(self, layer: int) -> frozenset[int]:
        """The experts of a layer that lie in slots now, or are on their way there."""
        return frozenset(self._slots.table.in_layer(layer))

    def whole(self, layer: int) -> Whole | None:
        """See `Slots.whole`."""
        return self._slots.whole(layer)

    def waves(
        self,
        layer: int,
        chosen: NDArray[np.int64],
        foreseen: NDArray[np.int64] = NOTHING,
        stage: Stage = torch.from_numpy,
    ) -> Generator[Wave]:
        """Bring a step's experts through the slots. chosen [n]: their ids, -1 for one that is not here. The host slab
        must own every one; those that it can't read are in no wave (`take_lost`). foreseen [m]: ids that a router asked
        ahead gave for the next layer.

        What the caller computes with a wave must be under way when it asks for the next. What comes `afterwards` is
        done while a GPU computes; after a single wave when the cache is told to catch up.
        """
        self.catch_up()
        self.take_lost()  # A layer that was broken off may have left some.
        table = self._slots.table
        self.ahead.begin_layer(layer)
        found = table.look_up(layer, chosen)
        self.counters.look_up(len(found.needed), len(found.hits))
        missing, free = deque(found.missing), deque[int]()
        hits, late = table.split_late(layer, found.hits) if found.stirring else (found.hits, [])
        landing: deque[Wave] = deque()
        try:
            groups: list[Group] = []
            if missing:
                free.extend(table.victims(self._room_for(len(missing))))
                groups = grouped(missing, free, self._landing_group)
            if not missing and (len(found.needed) <= self._one_wave or not (groups or late)):
                coming = [expert for group in groups for expert in self._send(layer, group)[0]]
                # No other expert that the layer needs lies in a slot, so that the table itself says where.
                row = table.slot_at[layer]
                first = Wave([*hits, *late, *coming], row, stage(row))
            else:
                there = [(experts, table.slot_at[layer, experts].tolist()) for experts in (hits, late)]
                first, *landed = staged([*there, *groups], self._policy.num_experts, stage)
                landing.append(landed[0])
                landing += self._send_all(layer, groups, landed[1:], stage)
            learned = not (first.experts and self._link.defers)
            if learned:
                self._afterwards.learn(layer, found, foreseen)
            if first.experts:
                slots = self._slots.use(layer, first.experts, stirring=found.stirring or bool(found.missing))
                yield first
                table.release(slots, self._link.fence())
            if not (learned or missing or landing):
                self._afterwards.put_off(layer, found, foreseen)
                return
            if not learned:
                self._afterwards.learn(layer, found, foreseen)
            while missing or landing:
                if not landing:
                    free.extend(table.victims(len(missing)))
                    landing += self._submit(layer, missing, free, stage)
                    continue  # None of them may be readable.
                wave = landing.popleft()
                if not wave.experts:
                    continue
                slots = self._slots.use(layer, wave.experts, stirring=True)
                yield wave
                table.release(slots, self._link.fence())
                if missing:
                    free.extend(slots)
                    landing += self._submit(layer, missing, free, stage)
            self._afterwards.end(layer, found)
        finally:
            # A caller that broke off leaves copies under way into slots that are free for others from now on.
            for wave in landing:
                self._slots.use(layer, wave.experts, stirring=True)
            table.held[:] = False

    def catch_up(self) -> None:
        """Do now what was left to be done of the last layer, while a GPU computes it."""
        self._afterwards.catch_up()

    def _room_for(self, num_missing: int) -> int:
        if num_missing < self._stream_from:
            return num_missing
        self.counters.streamed_layers += 1
        return 2 * self._landing_group

    def _submit(self, layer: int, missing: deque[int], free: deque[int], stage: Stage) -> list[Wave]:
        """Send for as many missing experts as there are free slots."""
        groups = grouped(missing, free, self._landing_group)
        return self._send_all(layer, groups, staged(groups, self._policy.num_experts, stage), stage)

    def _send_all(self, layer: int, groups: list[Group], waves: list[Wave], stage: Stage) -> list[Wave]:
        """Send for groups, each as one submission; their waves, without what can't be read."""
        for number, group in enumerate(groups):
            sent = self._send(layer, group)
            if len(sent[0]) < len(group[0]):
                (waves[number],) = staged([sent], self._policy.num_experts, stage)
        return waves

    def _send(self, layer: int, group: Group) -> Group:
        sent, slots = self._slots.send(layer, *group, urgent=True)
        self._slots.table.hold(slots)
        return sent, slots

    def take_lost(self) -> list[int]:
        """The experts that the waves of the last layer lacked, since they can't be read."""
        return self._slots.take_lost()

    def let_go(self) -> None:
        """No step is under way: hold nothing."""
        self._slots.table.held[:] = False

    def forget(self, expert: ExpertId) -> None:
        """Drop an expert that this rank no longer owns."""
        self._slots.forget(expert)

    def warm_up(self, hottest: list[ExpertId]) -> None:
        """Fill empty slots, the hottest experts first, and wait until they are there."""
        self.ahead.measured(*self._slots.fill(hottest))

    def resize(self, num_slots: int, *, prefetch: bool = True) -> None:
        """Have so many slots from now on, with the most valuable of what was in them; prefetch: and a region for it.
        They are fewer where memory has no room. Nothing may be held."""
        self.catch_up()
        self.counters.resizes += 1
        self._slots.resize(num_slots)
        self.ahead.resized(keep_region=prefetch)

    def close(self) -> None:
        self._link.close()
