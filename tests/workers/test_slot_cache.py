from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId, Placement
from placement.topology import load_topology
from workers.host_slab import HostSlab
from workers.links import Arrival, DirectLink, Fence, Link, Pair
from workers.routing import RoutingTable
from workers.slot_cache import SlotCache, landing_group_of
from workers.thread_link import ThreadLink

LAYERS, EXPERTS, BLOB = 2, 12, 512


def _slab() -> HostSlab:
    slab = HostSlab(capacity=LAYERS * EXPERTS, blob_bytes=BLOB)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            slab.add(ExpertId(layer, expert), torch.full((BLOB,), 20 * layer + expert, dtype=torch.uint8))
    return slab


def _cache(
    num_slots: int,
    *,
    link: Link | None = None,
    policy: PolicyName = PolicyName.LRU,
    one_wave: int = 0,
    landing_group: int = 4,
    guesses: bool = False,
    serves: Callable[[ExpertId], bool] | None = None,
) -> SlotCache:
    return SlotCache(
        slab=_slab(),
        policy=EvictionPolicy(policy, num_layers=LAYERS, num_experts=EXPERTS, top_k=2, share=0.3),
        link=link or DirectLink(),
        num_slots=num_slots,
        blob_bytes=BLOB,
        device=torch.device("cpu"),
        landing_group=landing_group,
        one_wave=one_wave,
        stream_from=8,
        prefetch_share=0.5,
        link_bytes_per_s=math.inf,
        guesses=guesses,
        serves=serves,
    )


def _run(cache: SlotCache, layer: int, experts: list[int], pause: Callable[[], None] = lambda: None) -> list[set[int]]:
    """One step; checks that each expert's slot holds its weights while it is held."""
    waves = []
    for wave in cache.waves(layer, np.array(experts, np.int64)):
        for _ in range(2):
            for expert in wave.experts:
                assert cache.slots[wave.slots[expert]].eq(20 * layer + expert).all()
            pause()
        waves.append(set(wave.experts))
    assert not cache._slots.table.held.any()
    return waves


def test_what_is_in_slots_comes_first_and_the_missing_ones_after() -> None:
    cache = _cache(4)
    _run(cache, 0, [0, 1])
    assert _run(cache, 0, [0, 1, 2, 3]) == [{0, 1}, {2, 3}]


def test_a_layer_that_needs_few_experts_comes_as_one_wave() -> None:
    cache = _cache(4, one_wave=4)
    _run(cache, 0, [0, 1])
    assert _run(cache, 0, [0, 1, 2, 3]) == [{0, 1, 2, 3}]
    assert _run(cache, 0, [4, 5, 6, 7, 8]) == [{4, 5, 6, 7}, {8}]


def test_more_experts_than_slots_come_in_several_waves() -> None:
    assert _run(_cache(2), 0, [0, 1, 2, 3, 4]) == [{0, 1}, {2, 3}, {4}]


def test_the_least_recently_used_expert_makes_room_in_any_layer() -> None:
    cache = _cache(2)
    for layer, expert in ((0, 0), (1, 1), (0, 0), (1, 2)):
        _run(cache, layer, [expert])
    assert (cache.resident(0), cache.resident(1)) == ({0}, {2})


def test_lookups_hits_copies_and_evictions_are_counted() -> None:
    cache = _cache(2)
    for step in ([0, 1], [1, 2]):
        _run(cache, 0, step)
    counters = cache.counters
    assert (counters.lookups, counters.hits, counters.copies, counters.evictions) == (4, 1, 3, 1)
    assert counters.copied_bytes == 3 * BLOB
    assert counters.hit_rate == 0.25


def test_a_layer_that_needs_nearly_everything_streams_and_leaves_the_rest_of_the_cache_alone() -> None:
    cache = _cache(12, policy=PolicyName.LFU)
    for _ in range(3):
        _run(cache, 1, [0, 1, 2, 3])
    waves = _run(cache, 0, list(range(EXPERTS)))
    assert [len(wave) for wave in waves] == [4, 4, 4]
    assert cache.resident(1) == {0, 1, 2, 3}
    assert cache.counters.streamed_layers == 1


@pytest.mark.parametrize("one_wave", [0, EXPERTS])
def test_layers_that_all_need_everything_find_some_of_it_in_few_slots(one_wave: int) -> None:
    cache = _cache(8, policy=PolicyName.REUSE, landing_group=1, one_wave=one_wave)
    for step in range(12):
        for layer in range(LAYERS):
            if step == 6 and layer == 0:
                before = cache.counters.hits
            _run(cache, layer, [0, 1, 2, 3, 4, 5, 6])
    # Two of the slots are passed through; the others serve once a step each.
    assert cache.counters.hits - before == 6 * 6


def test_few_large_experts_are_sent_for_as_one() -> None:
    assert [landing_group_of(size) for size in (1000, 12_583_168, 30_000_000, 352_321_536)] == [8, 8, 3, 1]


def test_a_forgotten_expert_is_fetched_anew() -> None:
    slab = _slab()
    cache = _cache(2)
    cache._slots._slab = slab
    _run(cache, 0, [0])
    cache.forget(ExpertId(0, 0))
    slab.release(ExpertId(0, 0))
    slab.add(ExpertId(0, 0), torch.full((BLOB,), 99, dtype=torch.uint8))
    (wave,) = cache.waves(0, np.array([0]))
    assert cache.slots[wave.slots[0]].eq(99).all()


def test_a_step_that_breaks_off_leaves_nothing_held() -> None:
    cache = _cache(3)
    steps = cache.waves(0, np.array([0, 1, 2]))
    next(steps)
    steps.close()
    assert _run(cache, 1, [3, 4, 5]) == [{3, 4, 5}]


def test_what_a_layer_that_breaks_off_could_not_read_is_not_missed_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = _cache(3)
    fetch = cache._slots._slab.fetch

    def fetch_all_but_the_first(experts: Sequence[ExpertId]) -> list[torch.Tensor | None]:
        return [blob if item.expert else None for item, blob in zip(experts, fetch(experts), strict=True)]

    monkeypatch.setattr(cache._slots._slab, "fetch", fetch_all_but_the_first)
    steps = cache.waves(0, np.array([0, 1]))
    next(steps)
    steps.close()
    _run(cache, 1, [1, 2])
    assert cache.take_lost() == []
    _run(cache, 1, [0, 1])
    assert cache.take_lost() == [0]


def test_a_prefetched_expert_is_a_hit_and_one_that_was_not_needed_is_counted_as_waste() -> None:
    cache = _cache(4)
    cache.ahead.prefetch(1, [5, 6])
    assert _run(cache, 1, [5]) == [{5}]
    _run(cache, 0, [0, 1, 2, 3])
    counters = cache.counters
    assert (counters.prefetched, counters.prefetch_used, counters.prefetch_wasted_bytes) == (2, 1, BLOB)


def test_no_more_wait_for_a_foreseen_use_than_the_region_holds() -> None:
    cache = _cache(6)
    cache.ahead.prefetch(1, [1, 2])
    cache.ahead.prefetch(1, [1, 2, 3, 4, 5])
    assert cache.resident(1) == {1, 2, 3}
    _run(cache, 1, [1])
    cache.ahead.prefetch(1, [6, 7, 8, 9])
    assert cache.resident(1) >= {6, 7, 8}


def test_a_prefetch_takes_no_slot_of_an_expert_that_is_expected_too() -> None:
    cache = _cache(2)
    _run(cache, 1, [0])
    _run(cache, 0, [3])
    cache.ahead.prefetch(1, [0, 5])
    assert cache.resident(1) == {0, 5}


def test_what_this_rank_does_not_hold_is_not_fetched_ahead() -> None:
    cache = _cache(4)
    cache.ahead.prefetch(LAYERS, [0, 1])
    assert cache.counters.prefetched == 0


def test_what_another_epoch_gave_this_rank_is_not_fetched_ahead_though_it_is_here_until_it_is_dropped() -> None:
    table = np.full((LAYERS, 2 * EXPERTS), -1, np.int32)
    table[:, :EXPERTS] = range(EXPERTS)
    table[:, EXPERTS] = 5
    served = Placement(epoch=1, num_ranks=2, num_experts=EXPERTS, physical_to_logical=table)
    routing = RoutingTable(placement=served, topology=load_topology("2x1"), rank=0, top_k=2)
    cache = _cache(4, serves=routing.serves)
    table = table.copy()
    table[:, 5] = -1
    after = Placement(epoch=2, num_ranks=2, num_experts=EXPERTS, physical_to_logical=table)
    routing.switch(after, after.weights_per_rank())
    cache.ahead.prefetch(1, [5, 6])
    assert cache.resident(1) == {6}


def test_without_a_router_to_ask_what_followed_so_far_is_fetched_ahead() -> None:
    cache = _cache(4, policy=PolicyName.REUSE, link=ThreadLink(bytes_per_s=1e9), guesses=True)
    for step in range(90):
        first = 2 * (step * step % 3 + step % 2)
        _run(cache, 0, [first, first + 1])
        _run(cache, 1, [first + 6, first + 7])
    counters = cache.counters
    assert counters.prefetched > 10
    assert counters.prefetch_used > 0.8 * counters.prefetched
    cache.close()


def test_a_resized_cache_keeps_the_most_valuable_and_serves_on() -> None:
    cache = _cache(6)
    for experts in ([0, 1, 2], [1], [2]):
        _run(cache, 0, experts)
    old = cache.slots
    cache.resize(2)
    assert (cache.num_slots, cache.generation, cache.resident(0)) == (2, 1, {1, 2})
    assert old.untyped_storage().nbytes() == 0
    assert _run(cache, 0, [0, 1, 2]) == [{1, 2}, {0}]


def test_warming_up_fills_the_slots_with_the_hottest() -> None:
    cache = _cache(3)
    cache.warm_up([ExpertId(1, expert) for expert in (7, 8, 9, 10)])
    assert cache.resident(1) == {7, 8, 9}


def test_an_urgent_copy_overtakes_a_prefetch_between_two_chunks() -> None:
    link = ThreadLink(bytes_per_s=2e5, chunk_bytes=BLOB // 2)
    source = torch.ones(20 * BLOB, dtype=torch.uint8)
    patient = link.copy([(torch.zeros_like(source), source)], after=None, urgent=False)
    urgent = link.copy([(torch.zeros(BLOB, dtype=torch.uint8), source[:BLOB])], after=None, urgent=True)
    urgent.wait()
    assert not patient.done()
    patient.wait()
    link.close()


def test_the_bucket_lets_through_what_its_rate_allows() -> None:
    link = ThreadLink(bytes_per_s=1e6, chunk_bytes=1000)
    source = torch.ones(100_000, dtype=torch.uint8)
    begun = time.monotonic()
    link.copy([(torch.zeros_like(source), source)], after=None, urgent=True).wait()
    assert time.monotonic() - begun > 0.08
    link.close()


STEPS = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.lists(st.integers(0, EXPERTS - 1), unique=True),
        st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=3),
        st.sampled_from([0, 0, 0, 0, 1, 3, 9]),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    num_slots=st.integers(1, 14),
    steps=STEPS,
    name=st.sampled_from([PolicyName.LRU, PolicyName.REUSE]),
    one_wave=st.sampled_from([0, 5]),
)
def test_every_expert_of_every_step_is_served_with_its_own_weights(
    num_slots: int, steps: list[tuple[int, list[int], list[int], int]], name: PolicyName, one_wave: int
) -> None:
    cache = _cache(num_slots, policy=name, one_wave=one_wave)
    for layer, experts, ahead, size in steps:
        waves = _run(cache, layer, experts)
        assert sorted(expert for wave in waves for expert in wave) == sorted(experts)
        cache.ahead.prefetch((layer + 1) % LAYERS, ahead)
        if size:
            cache.resize(size)


class _PuttingOff(DirectLink):
    """Has a cache do things in the order in which it does them on a GPU, and remembers what copies waited for."""

    overlaps = True
    defers = True

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[int | None] = []

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> Arrival:
        self.waited_for.append(None if after is None else after.number)
        return super().copy(pairs, after=after, urgent=urgent)


@given(steps=STEPS, num_slots=st.integers(1, 20), one_wave=st.sampled_from([0, 4, 16]))
@settings(deadline=None)
def test_what_is_put_off_changes_no_decision(
    steps: list[tuple[int, list[int], list[int], int]], num_slots: int, one_wave: int
) -> None:
    caches = [
        _cache(num_slots, link=link, policy=PolicyName.REUSE, one_wave=one_wave) for link in (None, _PuttingOff())
    ]
    for layer, experts, ahead, size in steps:
        for cache in caches:
            _run(cache, layer, experts)
            if ahead:
                cache.catch_up()
                cache.ahead.prefetch((layer + 1) % LAYERS, ahead)
            if size:
                cache.resize(size)
        assert caches[0].resident(0) == caches[1].resident(0)
        assert caches[0].resident(1) == caches[1].resident(1)
        assert caches[0].counters.hits == caches[1].counters.hits


def test_what_is_used_while_others_are_ranked_does_not_make_room() -> None:
    caches = [_cache(3, link=link, one_wave=4) for link in (None, _PuttingOff())]
    for cache in caches:
        for experts in ([0, 1, 2], [0], [3]):
            _run(cache, 0, experts)
        assert cache.resident(0) == {0, 2, 3}


def test_a_copy_waits_only_for_the_computing_that_may_still_be_under_way() -> None:
    link = _PuttingOff()
    cache = _cache(2, link=link, one_wave=4)
    _run(cache, 0, [0, 1])
    cache.ahead.prefetch(1, [5])  # What lies in its slot may still be computed with.
    _run(cache, 0, [2])  # The ids of this layer are there: all that was computed before is done.
    assert link.waited_for == [None, 1, None]


@pytest.mark.parametrize("seed", range(3))
def test_no_race_is_lost_when_every_event_takes_a_random_time(seed: int) -> None:
    rng = random.Random(seed)

    def delay() -> None:
        time.sleep(rng.choice([0, 0, 0, 0.0002, 0.001]))

    link = ThreadLink(bytes_per_s=1e8, chunk_bytes=BLOB // 2, delay=delay, defers=seed % 2 == 1)
    cache = _cache(rng.randint(2, 10), link=link, policy=PolicyName.REUSE)
    pick = np.random.default_rng(seed)
    for step in range(80):
        layer = step % LAYERS
        experts = pick.choice(EXPERTS, rng.randint(0, EXPERTS), replace=False).tolist()
        waves = _run(cache, layer, experts, pause=delay)
        assert sorted(expert for wave in waves for expert in wave) == sorted(experts)
        cache.ahead.guess((layer + 1) % LAYERS, 3)
        if rng.random() < 0.05:
            cache.resize(rng.randint(1, 12))
    cache.close()
