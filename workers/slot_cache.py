"""The slot cache: a fixed array of GPU slots in front of the host slab, one arena for all layers.

What a layer needs comes in waves: what is in slots already first, the missing experts as they land. A slot is *held*
from lookup until its wave is over, and overwritten only behind the fence of its last use. Who makes room is the choice
of the policy (`placement.cache`). When very much is missing, experts stream through two groups of slots, and what the
cache holds stays. The slots themselves are `slots.py`, what is fetched ahead of its layer `ahead.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
import torch
from numpy.typing import NDArray

from placement.cache.policy import EvictionPolicy
from placement.core import ExpertId
from workers.afterwards import Afterwards
from workers.ahead import Ahead
from workers.host_slab import HostSlab
from workers.learner import Learner
from workers.links import Link
from workers.memory import CountedMemory, Memory
from workers.passage import NOTHING, Passage
from workers.slots import Slots, Whole
from workers.telemetry import CacheCounters
from workers.wave import Stage, Wave

LANDING_GROUP, LANDING_BYTES = 8, 100_000_000
ONE_WAVE = 16
STREAM_FROM, STREAM_SHARE = 48, 0.25
PREFETCH_SHARE = 0.125


class SlotCache:
    """[num_slots, blob_bytes] uint8 on the device. One thread at a time may use it.

    landing_group: experts sent for as one (see `landing_group_of`). one_wave: layers that need no more come as one
    wave, since launching the products twice would cost more than they could overlap. stream_from, stream_share: with so
    many missing from one layer, or with more than this share of the slots, they stream through two landing groups.
    prefetch_share: the region of prefetches, as a share of the slots. link_bytes_per_s: what prefetches may count on;
    measured at the warm-up unless given (see `prefetch.LinkRoom`).
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
        landing_group: int | None = None,
        one_wave: int = ONE_WAVE,
        stream_from: int = STREAM_FROM,
        stream_share: float = STREAM_SHARE,
        prefetch_share: float = PREFETCH_SHARE,
        link_bytes_per_s: float | None = None,
        guesses: bool = False,
        memory: Memory | None = None,
        serves: Callable[[ExpertId], bool] | None = None,
    ) -> None:
        self.counters = CacheCounters(stream_from=stream_from)
        self._link = link
        self._num_experts = policy.num_experts
        self._learner = learner = Learner(policy)
        self._slots = Slots(
            slab=slab,
            policy=learner,
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
            policy=learner,
            link=link,
            counters=self.counters,
            share=prefetch_share,
            link_bytes_per_s=link_bytes_per_s,
            serves=slab.holds if serves is None else serves,
        )
        self._afterwards = Afterwards(self._slots, learner, self.ahead, guesses=guesses)
        self._passage = Passage(
            self._slots,
            link=link,
            ahead=self.ahead,
            afterwards=self._afterwards,
            counters=self.counters,
            num_experts=policy.num_experts,
            landing_group=landing_group_of(blob_bytes) if landing_group is None else landing_group,
            one_wave=one_wave,
            stream_from=stream_from,
            stream_share=stream_share,
        )

    @property
    def slots(self) -> torch.Tensor:
        """[num_slots, blob_bytes]; another tensor after each resize."""
        return self._slots.array

    @property
    def generation(self) -> int:
        """Counts the resizes."""
        return self._slots.generation

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return self._num_experts

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
        show: Stage | None = None,
    ) -> Generator[Wave]:
        """Bring a step's experts through the slots; see `Passage.waves`."""
        return self._passage.waves(layer, chosen, foreseen, stage, show)

    def catch_up(self) -> None:
        """Do now all that was put off of the last layers."""
        self._afterwards.catch_up()

    def use_the_time(self) -> None:
        """Do what was put off of the last layers, as far as it pays now: the host is about to wait for the device."""
        self._afterwards.use_the_time()

    def take_lost(self) -> list[int]:
        """The experts that the waves of the last layer lacked, since they can't be read."""
        return self._slots.take_lost()

    def let_go(self) -> None:
        """No step is under way: hold nothing. What a step that ended early left on any stream is waited for."""
        if self.slots.device.type == "cuda":
            torch.cuda.synchronize(self.slots.device)
        self._slots.let_go()

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
        self._learner.close()
        self._link.close()


def landing_group_of(blob_bytes: int) -> int:
    """How many experts are sent for as one: where they are large one, since slots are few then, and a submission costs
    little beside the copy."""
    return max(1, min(LANDING_GROUP, round(LANDING_BYTES / blob_bytes)))
