"""How a layer's experts come through the slots: what is there at once, what is missing as it lands."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import numpy as np
import torch
from numpy.typing import NDArray

from workers.afterwards import Afterwards
from workers.ahead import Ahead
from workers.links import Link
from workers.slot_table import Found
from workers.slots import Slots
from workers.telemetry import CacheCounters
from workers.wave import Group, Stage, Wave, grouped, staged

NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)


class Passage:
    """The way of a layer's experts through slots; see `SlotCache` for the arguments."""

    def __init__(
        self,
        slots: Slots,
        *,
        link: Link,
        ahead: Ahead,
        afterwards: Afterwards,
        counters: CacheCounters,
        num_experts: int,
        landing_group: int,
        one_wave: int,
        stream_from: int,
        stream_share: float,
    ) -> None:
        self._slots = slots
        self._link = link
        self._ahead = ahead
        self._afterwards = afterwards
        self._counters = counters
        self._num_experts = num_experts
        self._landing_group = landing_group
        self._one_wave = one_wave
        self._stream_from = stream_from
        self._stream_share = stream_share

    def waves(
        self,
        layer: int,
        chosen: NDArray[np.int64],
        foreseen: NDArray[np.int64] = NOTHING,
        stage: Stage = torch.from_numpy,
        show: Stage | None = None,
    ) -> Generator[Wave]:
        """Bring a step's experts through the slots. chosen [n]: their ids, -1 for one that is not here. The host slab
        must own every one; those that it can't read are in no wave (`take_lost`). foreseen [m]: ids that a router asked
        ahead gave for the next layer. stage, show: how tables come to the device, where there is time for it meanwhile,
        and where all waits for them (unless given, the same).

        All that was computed with slots before must be done, as it is where the ids come from the device; and what the
        caller computes with a wave must be under way when it asks for the next. What comes `afterwards` is done while a
        GPU computes; after a single wave some time after the next `use_the_time`.
        """
        self._afterwards.use_the_time()
        table = self._slots.table
        self._ahead.begin_layer(layer)
        found = table.look_up(layer, chosen)
        self._counters.look_up(len(found.needed), len(found.hits))
        try:
            missing = found.missing
            if missing and len(found.needed) <= self._one_wave and not self._streams(len(missing)):
                # Nothing is done before the copies are given that can be done after it.
                free = self._victims(len(missing))
                if len(free) == len(missing):
                    coming = self._send_in_groups(layer, missing, free)
                    yield from self._at_once(layer, found, foreseen, [*found.hits, *coming], stage)
                else:
                    yield from self._several(layer, found, foreseen, stage, free)
            elif missing or (found.stirring and len(found.needed) > self._one_wave):
                yield from self._several(layer, found, foreseen, stage, [])
            else:
                yield from self._at_once(layer, found, foreseen, found.hits, show or stage)
        except BaseException:
            # Of a layer that is broken off some are still held, and some may be lost.
            self._slots.let_go()
            self._slots.take_lost()
            raise

    def _at_once(
        self, layer: int, found: Found, foreseen: NDArray[np.int64], experts: list[int], stage: Stage
    ) -> Generator[Wave]:
        """A layer as one wave, all of it in slots or on its way there. No other expert that it needs lies in a slot, so
        that the table itself says where."""
        table = self._slots.table
        row = table.slot_at[layer]
        there = stage(row)
        slots = self._slots.use(layer, experts, stirring=found.stirring or bool(found.missing))
        if self._link.defers:
            self._afterwards.put_off(layer, found, foreseen)
            if found.missing:
                self._afterwards.go_on(slots)
        else:
            # The computing holds up its caller: what is foreseen is sent for before it.
            self._afterwards.learn(layer, found, foreseen)
        if experts:
            yield Wave(experts, row, there)
        table.leave(slots)
        if not self._link.defers:
            self._afterwards.end(layer, found)

    def _several(
        self, layer: int, found: Found, foreseen: NDArray[np.int64], stage: Stage, free_now: list[int]
    ) -> Generator[Wave]:
        """What is there first, what is missing as it lands. free_now: slots that were asked for already."""
        table = self._slots.table
        missing, free = deque(found.missing), deque(free_now)
        hits, late = table.split_late(layer, found.hits) if found.stirring else (found.hits, [])
        landing: deque[Wave] = deque()
        if missing and not free:
            free.extend(self._victims(self._room_for(len(missing))))
        groups = grouped(missing, free, self._landing_group)
        there = [(experts, table.slot_at[layer, experts].tolist()) for experts in (hits, late)]
        first, *landed = staged([*there, *groups], self._num_experts, stage)
        landing.append(landed[0])
        landing += self._send_all(layer, groups, landed[1:], stage)
        if first.experts:
            slots = self._slots.use(layer, first.experts, stirring=found.stirring)
            if not self._link.defers:
                self._afterwards.learn(layer, found, foreseen)
            yield first
            table.release(slots, self._link.fence())
        if self._link.defers or not first.experts:
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

    def _victims(self, count: int) -> list[int]:
        """Up to so many slots that may be overwritten, as the policy says that has learned of all layers so far."""
        return self._slots.table.victims(count, before_ranking=self._afterwards.catch_up)

    def _room_for(self, num_missing: int) -> int:
        if not self._streams(num_missing):
            return num_missing
        self._counters.streamed_layers += 1
        return 2 * self._landing_group

    def _streams(self, num_missing: int) -> bool:
        """Whether so many would put out too much of what other layers need sooner."""
        if num_missing >= self._stream_from:
            return True
        return num_missing > max(2 * self._landing_group, self._stream_share * len(self._slots))

    def _submit(self, layer: int, missing: deque[int], free: deque[int], stage: Stage) -> list[Wave]:
        """Send for as many missing experts as there are free slots."""
        groups = grouped(missing, free, self._landing_group)
        return self._send_all(layer, groups, staged(groups, self._num_experts, stage), stage)

    def _send_all(self, layer: int, groups: list[Group], waves: list[Wave], stage: Stage) -> list[Wave]:
        """Send for groups, each as one submission; their waves, without what can't be read."""
        for number, group in enumerate(groups):
            sent = self._send(layer, group)
            if len(sent[0]) < len(group[0]):
                (waves[number],) = staged([sent], self._num_experts, stage)
        return waves

    def _send_in_groups(self, layer: int, experts: list[int], slots: list[int]) -> list[int]:
        """The experts that are on their way."""
        size = self._landing_group
        if len(experts) <= size:
            return self._send(layer, (experts, slots))[0]
        starts = range(0, len(experts), size)
        groups = [(experts[start : start + size], slots[start : start + size]) for start in starts]
        return [expert for group in groups for expert in self._send(layer, group)[0]]

    def _send(self, layer: int, group: Group) -> Group:
        sent, slots = self._slots.send(layer, *group, urgent=True)
        self._slots.table.hold(slots)
        return sent, slots
