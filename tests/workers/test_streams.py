"""The slot cache before a device that computes later than it is told: each kernel reads the experts it was meant for,
however long it waits, whatever comes between."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from tests.workers.streams import Device, StreamLink, StreamStaging
from workers.blob import BlobLayout
from workers.disk_tier import DiskTier
from workers.host_slab import HostSlab
from workers.slot_cache import SlotCache
from workers.tiered_slab import TieredSlab
from workers.wave import Wave

LAYERS, EXPERTS, BLOB = 3, 9, 64


class _BrokenOffError(Exception):
    """By whoever computes."""


class _Unreadable(HostSlab):
    """A slab of which some experts can't be read."""

    def __init__(self, rank: _Rank) -> None:
        super().__init__(capacity=LAYERS * EXPERTS, blob_bytes=BLOB)
        self._rank = rank

    def fetch(self, experts: Sequence[ExpertId]) -> list[torch.Tensor | None]:
        found = zip(experts, super().fetch(experts), strict=True)
        return [None if expert in self._rank.broken else blob for expert, blob in found]


class _Source:
    """A rank's experts as they lie on disk."""

    layout = BlobLayout(fields=(), num_bytes=BLOB)
    lasts = True

    def __init__(self, rank: _Rank) -> None:
        self._rank = rank

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        if expert in self._rank.broken:
            raise OSError("Input/output error")
        out.fill_(self._rank.bytes_of[expert])


class _Rank:
    """Layer after layer, as `ExpertCompute` runs them on a GPU. Each expert's bytes are one number, another each time
    that it comes to this rank."""

    def __init__(
        self, seed: int, *, fails: bool = False, forgets_fences: bool = False, host_rows: int | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.device = Device(rng)
        self.bytes_of: dict[ExpertId, int] = {}
        self.broken: frozenset[ExpertId] = frozenset()
        self.slab = self._slab(host_rows)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                self.own(ExpertId(layer, expert))
        self.fails = fails
        self.failures = self.raised = 0
        self.cache = SlotCache(
            slab=self.slab,
            policy=EvictionPolicy(
                PolicyName.REUSE,
                num_layers=LAYERS,
                num_experts=EXPERTS,
                top_k=2,
                share=0.4,
            ),
            link=StreamLink(self.device, chunk_bytes=BLOB // 2, breaks=self._trouble, forgets_fences=forgets_fences),
            num_slots=rng.choice([1, 2, 5, 9, 14, LAYERS * EXPERTS]),
            blob_bytes=BLOB,
            device=torch.device("cpu"),
            landing_group=rng.choice([1, 2, 8]),
            one_wave=rng.choice([0, 3, 16]),
            stream_from=rng.choice([0, 2, 5, 48]),
            prefetch_share=rng.choice([0.0, 0.5, 1.0]),
            link_bytes_per_s=math.inf,
            guesses=rng.random() < 0.3,
        )
        self.stagings = [StreamStaging(self.device, capacity=rng.choice([24, 64, 1024])) for _ in range(LAYERS)]
        self.runs_short = rng.choice([0.0, 0.03])
        self.wrong: list[str] = []

    def _slab(self, host_rows: int | None) -> HostSlab:
        if host_rows is None:
            return _Unreadable(self)
        disk = DiskTier(source=_Source(self), file=None)
        return TieredSlab(rows=host_rows, capacity=LAYERS * EXPERTS, blob_bytes=BLOB, disk=disk)

    def own(self, item: ExpertId) -> None:
        self.bytes_of[item] = self.rng.randint(1, 255)
        self.slab.add(item, torch.full((BLOB,), self.bytes_of[item], dtype=torch.uint8))

    def _trouble(self) -> str:
        if not self.fails or self.rng.random() > 0.05:
            return ""
        self.failures += 1
        return self.rng.choice(["lost", "refused"])

    def layer(self, layer: int, *, most: int = EXPERTS) -> None:
        """Look up, launch, go on. RuntimeError where a copy fails, _BrokenOff where the computing does."""
        rng, cache, staging = self.rng, self.cache, self.stagings[layer]
        wanted = [rng.choice([-1, *range(EXPERTS)]) for _ in range(rng.randint(0, most))]
        chosen = staging.ids(wanted, meanwhile=cache.use_the_time)
        foreseen = np.array(rng.choices(range(EXPERTS), k=rng.choice([0, 0, 4])), np.int64)
        breaks_off = rng.choice([-1] * 12 + [0, 1, 2])
        computed: list[int] = []

        def send(array: NDArray[np.int64]) -> torch.Tensor:
            if rng.random() < self.runs_short:
                raise _BrokenOffError
            return staging.send(array)

        waves = cache.waves(layer, chosen, foreseen, send, staging.show)
        try:
            for number, wave in enumerate(waves):
                if number == breaks_off:
                    raise _BrokenOffError
                self.device.launch(self.device.compute, self._kernel(layer, wave))
                computed += wave.experts
                if rng.random() < 0.03:
                    raise _BrokenOffError
        finally:
            waves.close()
            assert not cache._slots.table.held.any()
        lost = cache.take_lost()
        assert sorted(computed + lost) == sorted(set(wanted) - {-1})
        assert all(ExpertId(layer, expert) in self.broken for expert in lost)

    def _kernel(self, layer: int, wave: Wave) -> Callable[[], None]:
        """It finds its experts by the table, when it runs."""
        slots, there = self.cache.slots, wave.there
        expected = {expert: self.bytes_of[ExpertId(layer, expert)] for expert in wave.experts}

        def run() -> None:
            for expert, value in expected.items():
                found = slots[int(there[expert])]
                if not found.eq(value).all():
                    self.wrong.append(f"layer {layer}, expert {expert}: {found.unique().tolist()} and not {value}")

        return run

    def between(self) -> None:
        """What may come between two layers."""
        rng, cache = self.rng, self.cache
        draw = rng.random()
        if draw < 0.06:
            # As `Slots.resize` does on a GPU.
            self.device.synchronize()
            cache.resize(rng.choice([1, 3, 8, 14, LAYERS * EXPERTS]), prefetch=rng.random() < 0.8)
        elif draw < 0.14:
            item = ExpertId(rng.randrange(LAYERS), rng.randrange(EXPERTS))
            cache.forget(item)
            self.slab.release(item)
            self.own(item)
        elif draw < 0.2:
            cache.ahead.guess(rng.randrange(LAYERS), rng.randint(1, EXPERTS))
        elif draw < 0.24:
            cache.let_go()
        elif draw < 0.28:
            cache.warm_up(rng.sample(sorted(self.bytes_of), 9))
        elif draw < 0.36:
            self.broken = frozenset(rng.sample(sorted(self.bytes_of), rng.choice([0, 0, 5])))

    def run(self, steps: int, *, most: int = EXPERTS) -> None:
        for _ in range(steps):
            for layer in range(LAYERS):
                for act in (self.between, lambda layer=layer: self.layer(layer, most=most)):
                    try:
                        act()
                    except _BrokenOffError:
                        continue
                    except RuntimeError as error:
                        if str(error) not in ("a batch was lost", "a batch was refused"):
                            raise
                        self.raised += 1
        self.device.synchronize()


@pytest.mark.parametrize("most", [2, EXPERTS])
@pytest.mark.parametrize("seed", range(40))
def test_every_kernel_reads_what_it_was_meant_to_whenever_it_runs(seed: int, most: int) -> None:
    rank = _Rank(seed)
    rank.run(12, most=most)
    assert rank.wrong == []


@pytest.mark.parametrize("seed", range(40))
def test_a_copy_that_fails_is_raised_at_most_once_and_fetched_anew(seed: int) -> None:
    rank = _Rank(seed, fails=True)
    rank.run(12)
    assert rank.wrong == []
    assert rank.raised <= rank.failures


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_memory_are_overwritten_only_when_no_copy_reads_them(seed: int) -> None:
    rank = _Rank(seed, host_rows=10, fails=seed % 2 == 1)
    rank.run(8)
    assert rank.wrong == []


def test_a_fence_that_is_not_waited_for_shows() -> None:
    ranks = [_Rank(seed, forgets_fences=True) for seed in range(20)]
    for rank in ranks:
        rank.run(12)
    assert sum(bool(rank.wrong) for rank in ranks) > 5
