"""A cache whose policy learns in a thread decides, slot by slot, as one that has learned all before each layer."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from workers.host_slab import HostSlab
from workers.links import DirectLink
from workers.slot_cache import SlotCache

BLOB = 64
SHAPES = [(1, 1), (1, 6), (2, 5), (3, 9), (4, 9), (2, 140)]


class _PuttingOff(DirectLink):
    """Has a cache do things in the order in which it does them on a GPU."""

    overlaps = True
    defers = True


class _BrokenOffError(Exception):
    """By whoever computes."""


class _Pair:
    """The same cache twice, one without its policy's thread."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = rng = random.Random(seed)
        self.layers, self.experts = rng.choice(SHAPES)
        self.items = [ExpertId(layer, expert) for layer in range(self.layers) for expert in range(self.experts)]
        slab = HostSlab(capacity=len(self.items), blob_bytes=BLOB)
        for number, item in enumerate(self.items):
            slab.add(item, torch.full((BLOB,), number % 251, dtype=torch.uint8))
        self.most = rng.choice([2, 4, 9])
        options = {
            "num_slots": rng.choice([1, 3, 6, 10, 16, 2 * len(self.items)]),
            "landing_group": rng.choice([1, 4]),
            "one_wave": rng.choice([0, 4, 16, 16]),
            "stream_from": rng.choice([3, 48, 48]),
            "prefetch_share": rng.choice([0.0, 0.5]),
            "guesses": rng.random() < 0.3,
        }
        self.foresees = rng.random() < 0.3
        self.caches = [
            SlotCache(
                slab=slab,
                policy=EvictionPolicy(
                    PolicyName.REUSE, num_layers=self.layers, num_experts=self.experts, top_k=2, share=0.3
                ),
                link=_PuttingOff(),
                blob_bytes=BLOB,
                device=torch.device("cpu"),
                link_bytes_per_s=math.inf,
                **options,
            )
            for _ in range(2)
        ]
        monkeypatch.setattr(self.caches[0]._afterwards, "_is_for_the_caller", lambda: True)
        for cache in self.caches:
            self._have_it_allow_now_and_then(cache, seed)

    def _have_it_allow_now_and_then(self, cache: SlotCache, seed: int) -> None:
        """What is fetched ahead pays at times only."""
        draws = random.Random(seed)
        cache.ahead.looks_ahead = lambda: draws.random() < 0.5  # type: ignore[method-assign]

    def layer(self, layer: int) -> None:
        rng = self.rng
        favourites = range(min(self.experts, 5)) if rng.random() < 0.8 else range(self.experts)
        chosen = np.array([rng.choice([-1, *favourites]) for _ in range(rng.randint(0, self.most))], np.int64)
        count = rng.choice([0, 3]) if self.foresees else 0
        foreseen = np.array(rng.choices(range(self.experts), k=count), np.int64)
        breaks_off = rng.choice([-1] * 15 + [0, 1])
        waits = rng.choice([0, 0, 1, 2])
        for cache in self.caches:
            for _ in range(waits):
                cache.use_the_time()
            self._run(cache, layer, chosen, foreseen, breaks_off)

    def _run(self, cache: SlotCache, layer: int, chosen: np.ndarray, foreseen: np.ndarray, breaks_off: int) -> None:
        waves = cache.waves(layer, chosen, foreseen)
        try:
            for number, wave in enumerate(waves):
                for expert in wave.experts:
                    assert cache.slots[wave.slots[expert]].eq((layer * self.experts + expert) % 251).all()
                if number == breaks_off:
                    raise _BrokenOffError
        except _BrokenOffError:
            pass
        finally:
            waves.close()

    def between(self) -> None:
        rng, draw = self.rng, self.rng.random()
        size, item = rng.choice([1, 4, 9, 20]), rng.choice(self.items)
        hottest = rng.sample(self.items, min(4, len(self.items)))
        region = rng.random() < 0.8
        if draw > 0.13:
            return
        for cache in self.caches:
            # Who was ranked before an expert goes is not who is ranked after.
            cache.catch_up()
            if draw < 0.03:
                cache.resize(size, prefetch=region)
            elif draw < 0.07:
                cache.forget(item)
            elif draw < 0.09:
                cache.let_go()
            elif draw < 0.11:
                cache.warm_up(hottest)

    def check(self) -> None:
        first, second = (cache._slots.table for cache in self.caches)
        assert np.array_equal(first.slot_at, second.slot_at)
        assert np.array_equal(first.foreseen, second.foreseen)
        for table in (first, second):
            there = [(int(layer), int(expert)) for layer, expert in np.argwhere(table.slot_at >= 0)]
            assert len(there) == table.num_filled == np.count_nonzero(table._layer_in >= 0)
        mine, theirs = (cache.counters for cache in self.caches)
        assert (mine.hits, mine.copies, mine.evictions, mine.prefetch_used) == (
            theirs.hits,
            theirs.copies,
            theirs.evictions,
            theirs.prefetch_used,
        )

    def close(self) -> None:
        for cache in self.caches:
            cache.catch_up()
        memories = [cache._learner._policy.memory for cache in self.caches]
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(*memories, strict=True))
        for cache in self.caches:
            cache.close()


@pytest.mark.parametrize("seed", range(60))
def test_it_decides_as_one_that_has_learned_all_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _Pair(seed, monkeypatch)
    for _ in range(40):
        for layer in range(pair.layers):
            pair.between()
            pair.layer(layer)
            pair.check()
    pair.close()


def test_all_that_it_runs_is_compiled_before() -> None:
    script = """
import sys
from pytest import MonkeyPatch
from placement.cache.policy import compile_policies
from tests.workers.test_learning_beside import _Pair

def compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("placement.cache")]
    return {
        function.py_func.__name__: len(function.signatures)
        for module in modules
        for function in vars(module).values()
        if hasattr(function, "signatures")
    }

compile_policies()
before = compiled()
assert before["serve"] == 1
pair = _Pair(3, MonkeyPatch())
for step in range(20):
    for layer in range(pair.layers):
        pair.between()
        pair.layer(layer)
pair.close()
assert compiled() == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=250)
