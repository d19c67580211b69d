"""The slot table: what lies in each GPU slot, what is on its way there, and who makes room.

A slot is *held* while a layer may compute with it, *foreseen* from a prefetch until its expert is used or goes, and
*stirring* while something is left to be done when it is used: to wait for its arrival, or to count what was foreseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.cache.finding import HITS, MISSING, NEEDED, find
from placement.cache.policy import Candidates, Run
from placement.core import ExpertId
from workers.learner import Learner
from workers.links import Arrival, Fence, is_settled_well


class Found(NamedTuple):
    """A layer's lookup, experts in ascending order. needed: an array that is written anew by the next lookup.
    stirring: some of the hits have something to be done when they are used."""

    needed: NDArray[np.int64]
    hits: list[int]
    missing: list[int]
    stirring: bool


class SlotTable:
    """S slots, empty at first. slot_at [L, E + 1]: the slot of each expert, -1 for none, and for the expert -1.

    arrival: by slot, where there is one. awaited: those that the computing since the last lookup was told to wait for,
    so that they may still be on their way.
    """

    def __init__(self, num_slots: int, policy: Learner) -> None:
        assert num_slots >= 1
        layers, experts = policy.num_layers, policy.num_experts
        self.slot_at: NDArray[np.int64] = np.full((layers, experts + 1), -1, np.int64)
        self.held: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.foreseen: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.stirring: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.arrival: list[Arrival | None] = [None] * num_slots
        self.awaited: list[Arrival] = []
        self.num_filled = 0
        self.num_foreseen = 0
        self._fence: list[Fence | None] = [None] * num_slots
        # Those that have a fence, and those for whose last use there is none yet.
        self._fenced: list[int] = []
        self._unfenced: list[int] = []
        self._layer_in: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self._expert_in: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self._policy = policy
        self._ahead: dict[int, Arrival] = {}
        self._ranked: list[int] = []
        # Whether the policy's thread ranks, and what was used since it began.
        self._ranking = False
        self._used_since: list[int] = []
        self._found: NDArray[np.int64] = np.zeros((3, experts + 1), np.int64)

    def look_up(self, layer: int, chosen: NDArray[np.int64]) -> Found:
        """Find a layer's distinct experts among chosen [n] (-1: none), and hold those that are in slots: what was found
        of their value is old. All uses of slots so far must be over: no copy has to wait for them, and what they waited
        for is there."""
        for slot in self._fenced:
            self._fence[slot] = None
        self._fenced.clear()
        self._unfenced = []
        self.awaited = []
        found = self._found
        needed, hits, stirring = find(self.slot_at, self.held, self.stirring, layer, chosen, found)
        there: list[int] = found[HITS, :hits].tolist()
        if self._ranked:
            self._ranked = [slot for slot in self._ranked if not self.held[slot]]
        elif self._ranking:
            self._used_since += self.slot_at[layer, there].tolist()
        return Found(found[NEEDED, :needed], there, found[MISSING, : needed - hits].tolist(), stirring > 0)

    def slot_of(self, item: ExpertId) -> int | None:
        """Where an expert lies, if it does."""
        layers, experts = self.slot_at.shape
        if item.layer >= layers or item.expert >= experts - 1:
            return None
        slot = int(self.slot_at[item.layer, item.expert])
        return slot if slot >= 0 else None

    def in_layer(self, layer: int) -> list[int]:
        """The experts of a layer that are in slots."""
        return [int(expert) for expert in np.flatnonzero(self.slot_at[layer] >= 0)]

    def place(self, layer: int, experts: list[int], slots: list[int], arrival: Arrival) -> None:
        """Experts are on their way into slots that were emptied."""
        for expert, slot in zip(experts, slots, strict=True):
            self.slot_at[layer, expert] = slot
            self._layer_in[slot], self._expert_in[slot] = layer, expert
            self.arrival[slot] = arrival
            self.stirring[slot] = True
        self.num_filled += len(slots)

    def empty(self, slot: int) -> bool:
        """Let go of what is in a slot. Returns whether anything was."""
        layer = self._layer_in[slot]
        if layer < 0:
            return False
        self.slot_at[layer, self._expert_in[slot]] = -1
        self._layer_in[slot] = -1
        self.num_filled -= 1
        return True

    def vacant(self) -> list[int]:
        """The slots that are empty."""
        return [int(slot) for slot in np.flatnonzero(self._layer_in < 0)]

    def last_use(self, slots: list[int], new_fence: Callable[[], Fence]) -> Fence | None:
        """The newest fence of these slots. new_fence: makes one behind all that is under way."""
        if self._unfenced and not set(self._unfenced).isdisjoint(slots):
            return new_fence()
        newest: Fence | None = None
        for slot in slots:
            fence = self._fence[slot]
            if fence is not None and (newest is None or fence.number > newest.number):
                newest = fence
        return newest

    def hold(self, slots: list[int]) -> None:
        """They are used now, and nobody was ranked among them."""
        self.held[slots] = True

    def release(self, slots: list[int], fence: Fence) -> None:
        """The computing with these slots is under way, and over behind the fence."""
        for slot in slots:
            self._fence[slot] = fence
        self._fenced += slots
        self.held[slots] = False

    def leave(self, slots: list[int]) -> None:
        """The last computing of a layer, with these slots, is under way: whether it needs a fence is seen later, since
        to make one takes long."""
        self._unfenced += slots
        self.held[slots] = False

    def all_held(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.held)]

    def let_go(self) -> None:
        """Hold nothing more. What may still be computed with what was held is not known."""
        if self.held.any():
            self.leave(self.all_held())

    def arrived(self, slot: int) -> None:
        """There is nothing left to wait for."""
        self.arrival[slot] = None
        self.stirring[slot] = self.foreseen[slot]

    def by_value(self) -> list[ExpertId]:
        """What is in slots, the most valuable first."""
        filled = np.flatnonzero(self._layer_in >= 0)
        values = self._policy.values(self._layer_in[filled], self._expert_in[filled])
        order = filled[np.argsort(-values, kind="stable")]
        return [ExpertId(int(self._layer_in[slot]), int(self._expert_in[slot])) for slot in order]

    # ---------------------------------------------------------------------------------------------------- prefetches

    def expect(self, slots: list[int]) -> None:
        """Prefetches are on their way into these slots."""
        self.foreseen[slots] = True
        self.num_foreseen += len(slots)
        self._ahead = {slot: arrival for slot in slots if (arrival := self.arrival[slot]) is not None}

    def fulfil(self, slot: int) -> None:
        """What was foreseen has come true, or nothing will come of it."""
        self.foreseen[slot] = False
        self.num_foreseen -= 1
        self.stirring[slot] = self.arrival[slot] is not None

    def is_prefetching(self) -> bool:
        return any(not arrival.done() for arrival in self._ahead.values())

    def unused(self, layer: int) -> list[int]:
        """The foreseen slots of a layer."""
        if not self.num_foreseen:
            return []
        return [int(slot) for slot in np.flatnonzero(self.foreseen & (self._layer_in == layer))]

    def is_landing(self, slot: int) -> bool:
        arrival = self.arrival[slot]
        return arrival is not None and not arrival.done()

    def split_late(self, layer: int, hits: list[int]) -> tuple[list[int], list[int]]:
        """The experts of a layer that are there, and those that are still landing."""
        row = self.slot_at[layer]
        late = [expert for expert in hits if self.is_landing(row[expert])]
        return [expert for expert in hits if expert not in late], late

    # ---------------------------------------------------------------------------------------------------- making room

    def victims(
        self, count: int, sparing: Sequence[int] = (), before_ranking: Callable[[], None] = lambda: None
    ) -> list[int]:
        """Up to count slots that may be overwritten, none of sparing: empty ones, then those of least value.

        Whom `rank_ahead` ranked comes first; more are ranked anew where those do not suffice, after before_ranking.
        """
        if count == 0:
            return []
        ranked = self._still_ranked(sparing)
        if len(ranked) < count:
            before_ranking()
            ranked = self._still_ranked(sparing)
        if len(ranked) < count:
            free = self._open()
            free[list(sparing)] = False
            ranked = self._policy.rank(Candidates(self._layer_in, self._expert_in, free, count))
        self._ranked = ranked[count:]
        return ranked[:count]

    def _still_ranked(self, sparing: Sequence[int]) -> list[int]:
        """Of those that were ranked, who may be overwritten."""
        self._forget_landed()
        self._collect()
        held, ahead = self.held, self._ahead
        return [slot for slot in self._ranked if not held[slot] and slot not in ahead and slot not in sparing]

    def rank_ahead(self, count: int) -> None:
        """Find out now who makes room for so many next time."""
        self._forget_landed()
        self._ranking = False
        self._ranked = self._policy.rank(Candidates(self._layer_in, self._expert_in, self._open(), count))

    def learn_beside(self, runs: Sequence[Run], room: int, in_use: Sequence[int]) -> None:
        """Have the policy's thread learn these runs, and then find out who makes room for so many next time, if for
        any. in_use: slots of the last run, which will be free by then."""
        if room == 0:
            self._collect()
            self._policy.begin(runs)
            return
        self._forget_landed()
        self._policy.begin(runs, Candidates(self._layer_in, self._expert_in, self._open(in_use), room))
        self._ranking = True
        self._ranked, self._used_since = [], []

    def _collect(self) -> None:
        """What the policy's thread has found out."""
        if self._ranking:
            self._ranking = False
            self._ranked = [slot for slot in self._policy.ranked() if slot not in self._used_since]

    def _forget_landed(self) -> None:
        if self._ahead:
            self._ahead = {slot: arrival for slot, arrival in self._ahead.items() if not arrival.done()}

    def _open(self, in_use: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Which slots [S] may be overwritten, those in use among them."""
        free = ~self.held
        free[list(in_use)] = True
        # Prefetches are still writing there.
        free[list(self._ahead)] = False
        if self._ahead and not free.any():
            for arrival in self._ahead.values():
                is_settled_well(arrival)
            free = ~self.held
        return free
