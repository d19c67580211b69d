"""The slot table: what lies in each GPU slot, what is on its way there, and who makes room.

A slot is *held* while a layer may compute with it, *foreseen* from a prefetch until its expert is used or goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cache.policy import EvictionPolicy
from placement.core import ExpertId
from workers.links import Arrival, Fence


class SlotTable:
    """S slots, empty at first. arrival and fence: by slot, where there is one."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        assert num_slots >= 1
        self.slot_of: dict[ExpertId, int] = {}
        self.held: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.foreseen: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.arrival: list[Arrival | None] = [None] * num_slots
        self._fence: list[Fence | None] = [None] * num_slots
        self._item_in: list[ExpertId | None] = [None] * num_slots
        self._layer_in: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self._expert_in: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self._policy = policy
        self._ahead: dict[int, Arrival] = {}
        self._ranked: list[int] = []

    def place(self, items: list[ExpertId], slots: list[int], arrival: Arrival) -> None:
        """Experts are on their way into slots that were emptied."""
        for item, slot in zip(items, slots, strict=True):
            self.slot_of[item] = slot
            self._item_in[slot] = item
            self._layer_in[slot], self._expert_in[slot] = item.layer, item.expert
            self.arrival[slot] = arrival

    def empty(self, slot: int) -> ExpertId | None:
        """Let go of what is in a slot, if anything is."""
        item = self._item_in[slot]
        if item is not None:
            del self.slot_of[item]
            self._item_in[slot] = None
            self._layer_in[slot] = -1
        return item

    def vacant(self) -> list[int]:
        """The slots that are empty."""
        return [int(slot) for slot in np.flatnonzero(self._layer_in < 0)]

    def last_use(self, slots: list[int]) -> Fence | None:
        """The newest fence of these slots."""
        fences = [fence for slot in slots if (fence := self._fence[slot]) is not None]
        return max(fences, key=lambda fence: fence.number, default=None)

    def hold(self, slots: list[int]) -> None:
        """They are used now: what was found of their value is old."""
        self.held[slots] = True
        self._ranked = [slot for slot in self._ranked if not self.held[slot]]

    def release(self, slots: list[int], fence: Fence) -> None:
        """The computing with these slots is under way, and over behind the fence."""
        for slot in slots:
            self._fence[slot] = fence
        self.held[slots] = False

    def by_value(self) -> list[ExpertId]:
        """What is in slots, the most valuable first."""
        filled = np.flatnonzero(self._layer_in >= 0)
        values = self._policy.values(self._layer_in[filled], self._expert_in[filled])
        order = filled[np.argsort(-values, kind="stable")]
        return [item for slot in order if (item := self._item_in[slot]) is not None]

    # ---------------------------------------------------------------------------------------------------- prefetches

    def expect(self, slots: list[int]) -> None:
        """Prefetches are on their way into these slots."""
        self.foreseen[slots] = True
        self._ahead = {slot: arrival for slot in slots if (arrival := self.arrival[slot]) is not None}

    def is_prefetching(self) -> bool:
        return any(not arrival.done() for arrival in self._ahead.values())

    def unused(self, layer: int) -> list[int]:
        """The foreseen slots of a layer."""
        return [int(slot) for slot in np.flatnonzero(self.foreseen & (self._layer_in == layer))]

    def is_landing(self, slot: int) -> bool:
        arrival = self.arrival[slot]
        return arrival is not None and not arrival.done()

    # ---------------------------------------------------------------------------------------------------- making room

    def victims(self, count: int, sparing: Sequence[int] = ()) -> list[int]:
        """Up to count slots that may be overwritten, none of sparing: empty ones, then those of least value.

        Whom `rank_ahead` ranked comes first; more are ranked anew where those do not suffice.
        """
        if count == 0:
            return []
        free = self._open()
        free[list(sparing)] = False
        ranked = [slot for slot in self._ranked if free[slot]]
        if len(ranked) < count:
            ranked = self._rank(free, count)
        self._ranked = ranked[count:]
        return ranked[:count]

    def rank_ahead(self, count: int) -> None:
        """Find out now who makes room for so many next time."""
        self._ranked = self._rank(self._open(), count)

    def _open(self) -> NDArray[np.bool_]:
        """Which slots [S] may be overwritten."""
        free = ~self.held
        self._ahead = {slot: arrival for slot, arrival in self._ahead.items() if not arrival.done()}
        # Prefetches are still writing there.
        free[list(self._ahead)] = False
        if not free.any():
            for arrival in self._ahead.values():
                arrival.finish()
            free = ~self.held
        return free

    def _rank(self, free: NDArray[np.bool_], count: int) -> list[int]:
        """Up to count of the free slots, those to be overwritten first at the front."""
        empty = np.flatnonzero((self._layer_in < 0) & free)[:count]
        filled = np.flatnonzero((self._layer_in >= 0) & free)
        wanted = min(count - len(empty), len(filled))
        if wanted <= 0:
            return [int(slot) for slot in empty]
        values = self._policy.values(self._layer_in[filled], self._expert_in[filled])
        least = np.argpartition(values, wanted - 1)[:wanted]
        return [int(slot) for slot in (*empty, *filled[least[np.argsort(values[least])]])]
