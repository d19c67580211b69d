"""Host memory that is pinned in part, over streams in software: the cache is served as it is from pinned memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from placement.cache.policy import PolicyName
from tests.workers.bouncing import Gate, soft_bounce
from tests.workers.test_slot_cache import BLOB, EXPERTS, LAYERS, _cache, _run, _slab
from workers.pinning import HostRows
from workers.slot_cache import SlotCache

ROWS = 8


def _rows(num_pinned: int) -> HostRows:
    rows = torch.arange(1, ROWS + 1, dtype=torch.uint8).unsqueeze(1).expand(ROWS, BLOB).contiguous()
    return HostRows(rows, num_pinned)


def _pairs(memory: HostRows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(torch.zeros_like(memory.rows), memory.rows, strict=True))


@pytest.mark.parametrize("num_pinned", [0, 3, ROWS])
@pytest.mark.parametrize("urgent", [True, False])
def test_a_batch_arrives_whole_wherever_its_blobs_lie(num_pinned: int, urgent: bool) -> None:
    memory = _rows(num_pinned)
    pairs = _pairs(memory)
    link = soft_bounce(memory.pinned, chunk_bytes=BLOB // 3)
    arrival = link.copy(pairs, after=link.fence(), urgent=urgent)
    arrival.wait()
    assert arrival.done()
    assert all(torch.equal(*pair) for pair in pairs)
    link.close()


def test_an_urgent_batch_is_not_held_up_by_a_prefetch_whose_fence_is_not_reached() -> None:
    memory, gate = _rows(0), Gate()
    first, *rest = _pairs(memory)
    link = soft_bounce(memory.pinned, chunk_bytes=BLOB // 3)
    patient = link.copy(rest, after=gate, urgent=False)
    link.copy([first], after=None, urgent=True).finish()
    assert torch.equal(*first)
    assert not patient.done()
    gate.passed.set()
    patient.finish()
    link.close()


@pytest.mark.parametrize("num_pinned", [0, 1])
def test_a_slot_holds_what_was_asked_for_last_though_nobody_waited_for_what_came_before(num_pinned: int) -> None:
    memory, rng = _rows(num_pinned), random.Random(0)
    slot = torch.zeros(BLOB, dtype=torch.uint8)
    link = soft_bounce(memory.pinned, chunk_bytes=BLOB // 4, delay=lambda: time.sleep(rng.choice([0, 0, 0.003])))
    for turn in range(20):
        for row in (memory.rows[1 + turn % 7], memory.rows[0]):
            arrival = link.copy([(slot, row)], after=None, urgent=True)
        arrival.finish()
        assert torch.equal(slot, memory.rows[0])
    link.close()


def test_a_failure_reaches_the_layer_that_needs_the_expert_once_and_the_expert_is_fetched_anew() -> None:
    troubles = iter(["the cable is out"])

    def fail() -> None:
        for trouble in troubles:
            raise OSError(trouble)

    cache = _cache(4, link=soft_bounce(range(0), chunk_bytes=BLOB // 2, fails=fail))
    with pytest.raises(RuntimeError, match="lost on their way through the bounce ring: the cable is out"):
        _run(cache, 0, [0, 1])
    assert cache.resident(0) == frozenset()
    assert _run(cache, 0, [0, 1]) == [{0, 1}]
    cache.close()


def test_a_prefetch_that_fails_holds_nobody_up() -> None:
    troubles = iter(["the cable is out"])

    def fail() -> None:
        for trouble in troubles:
            raise OSError(trouble)

    cache = _cache(4, link=soft_bounce(range(0), chunk_bytes=BLOB // 2, fails=fail))
    cache.ahead.prefetch(1, [5])
    assert _run(cache, 0, [0, 1, 2, 3, 4])
    cache.resize(3)
    assert _run(cache, 1, [5]) == [{5}]
    cache.close()


def test_a_batch_that_the_ring_refuses_is_over_when_it_says_so() -> None:
    memory = _rows(4)
    link = soft_bounce(memory.pinned, chunk_bytes=BLOB // 3)
    link._urgent.close()
    pairs = _pairs(memory)
    with pytest.raises(RuntimeError, match="after shutdown"):
        link.copy(pairs, after=None, urgent=True)
    assert all(torch.equal(*pair) for pair in pairs[:4])
    link._urgent.wait_until_submitted()
    link.close()


def _half_pinned(num_slots: int, seed: int, fails: Callable[[], None] = lambda: None) -> SlotCache:
    """A cache of experts of which some lie in memory that is not pinned, with a random sleep at every event."""
    rng = random.Random(seed)

    def delay() -> None:
        time.sleep(rng.choice([0, 0, 0, 0.0002, 0.001]))

    slab = _slab()
    memory = HostRows(slab.memory.rows, rng.randint(0, LAYERS * EXPERTS))
    link = soft_bounce(
        memory.pinned, chunk_bytes=BLOB // 3, delay=delay, fails=fails, num_threads=1 + seed % 3, defers=seed % 2 == 1
    )
    cache = _cache(num_slots, link=link, policy=PolicyName.REUSE)
    cache._slots._slab = slab
    return cache


@pytest.mark.parametrize("seed", range(4))
def test_no_race_is_lost_when_every_event_takes_a_random_time(seed: int) -> None:
    rng, pick = random.Random(seed), np.random.default_rng(seed)
    cache = _half_pinned(rng.randint(2, 10), seed)
    for step in range(80):
        layer = step % LAYERS
        experts = pick.choice(EXPERTS, rng.randint(0, EXPERTS), replace=False).tolist()
        waves = _run(cache, layer, experts)
        assert sorted(expert for wave in waves for expert in wave) == sorted(experts)
        cache.ahead.guess((layer + 1) % LAYERS, 3)
        if rng.random() < 0.1:
            _break_off(cache, layer, rng)
        if rng.random() < 0.05:
            cache.resize(rng.randint(1, 12))
    cache.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_cable_that_fails_now_and_then_gives_nobody_the_wrong_expert(seed: int) -> None:
    rng, failures = random.Random(seed), []

    def fail() -> None:
        if rng.random() < 0.02:
            failures.append("the cable is out")
            raise RuntimeError(failures[-1])

    pick = np.random.default_rng(seed)
    cache, raised = _half_pinned(rng.randint(2, 10), seed, fail), 0
    for step in range(60):
        experts = pick.choice(EXPERTS, rng.randint(0, EXPERTS), replace=False).tolist()
        try:
            _run(cache, step % LAYERS, experts)
            cache.ahead.guess((step + 1) % LAYERS, 3)
            if rng.random() < 0.05:
                cache.resize(rng.randint(1, 12))
        except RuntimeError as error:
            assert "the cable is out" in str(error)
            raised += 1
    assert 0 < raised <= len(failures)
    cache.close()


def _break_off(cache: SlotCache, layer: int, rng: random.Random) -> None:
    waves = cache.waves(layer, np.array(rng.sample(range(EXPERTS), rng.randint(0, EXPERTS)), np.int64))
    for _ in range(rng.randint(0, 2)):
        next(waves, None)
    waves.close()
