from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from placement.core import ExpertId
from workers.host_slab import HostSlab
from workers.slot_cache import SlotCache

NUM_EXPERTS = 6


def _cache(slots_per_layer: int) -> tuple[HostSlab, SlotCache]:
    slab = HostSlab(capacity=2 * NUM_EXPERTS, blob_bytes=256)
    for layer in range(2):
        for expert in range(NUM_EXPERTS):
            slab.add(ExpertId(layer, expert), torch.full((256,), 10 * layer + expert, dtype=torch.uint8))
    cache = SlotCache(
        slab=slab, num_layers=2, slots_per_layer=slots_per_layer, blob_bytes=256, device=torch.device("cpu")
    )
    return slab, cache


def _run(cache: SlotCache, layer: int, experts: list[int]) -> list[set[int]]:
    """One step; checks that each expert's slot holds its weights while it is held."""
    waves = []
    for wave in cache.waves(layer, experts):
        for expert, slot in wave.slot_of.items():
            assert cache.arena(layer)[slot].eq(10 * layer + expert).all()
        waves.append(set(wave.slot_of))
    return waves


def test_what_is_in_slots_comes_first_and_the_missing_ones_after() -> None:
    _, cache = _cache(3)
    _run(cache, 0, [0, 1])
    assert _run(cache, 0, [0, 1, 2, 3]) == [{0, 1}, {2, 3}]


def test_more_experts_than_slots_come_in_several_waves() -> None:
    _, cache = _cache(2)
    assert _run(cache, 0, [0, 1, 2, 3, 4]) == [{0, 1}, {2, 3}, {4}]


def test_the_least_recently_used_expert_makes_room() -> None:
    _, cache = _cache(2)
    for step in ([0], [1], [0], [2]):
        _run(cache, 0, step)
    assert cache.resident(0) == {0, 2}


def test_layers_do_not_take_slots_from_each_other() -> None:
    _, cache = _cache(2)
    _run(cache, 0, [0, 1])
    _run(cache, 1, [2, 3, 4, 5])
    assert cache.resident(0) == {0, 1}


def test_lookups_hits_copies_and_evictions_are_counted() -> None:
    _, cache = _cache(2)
    for step in ([0, 1], [1, 2]):
        _run(cache, 0, step)
    counters = cache.counters
    assert (counters.lookups, counters.hits, counters.copies, counters.evictions) == (4, 1, 3, 1)
    assert counters.copied_bytes == 3 * 256
    assert counters.hit_rate == 0.25


def test_a_forgotten_expert_is_fetched_anew() -> None:
    slab, cache = _cache(2)
    _run(cache, 0, [0])
    cache.forget(ExpertId(0, 0))
    slab.release(ExpertId(0, 0))
    slab.add(ExpertId(0, 0), torch.full((256,), 99, dtype=torch.uint8))
    (wave,) = cache.waves(0, [0])
    assert cache.arena(0)[wave.slot_of[0]].eq(99).all()


@given(
    slots=st.integers(1, NUM_EXPERTS),
    steps=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True)), max_size=12),
)
def test_every_expert_of_every_step_is_served_with_its_own_weights(
    slots: int, steps: list[tuple[int, list[int]]]
) -> None:
    _, cache = _cache(slots)
    for layer, experts in steps:
        waves = _run(cache, layer, experts)
        assert sorted(expert for wave in waves for expert in wave) == sorted(experts)
        assert len(cache.resident(layer)) <= slots
