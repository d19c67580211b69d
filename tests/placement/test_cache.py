from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from placement.cache.arenas import equal_shares, shares_by_need
from placement.cache.policy import EvictionPolicy, PolicyName
from placement.cache.score import BY_NEED, score_policies
from placement.cache.simulate import belady_hits, simulate
from placement.cache.stream import LookupStream, make_stream
from placement.errors import ConfigError
from placement.trace import RoutingTrace

LAYERS, EXPERTS = 2, 4


def _trace(experts: list[Any], request: list[int]) -> RoutingTrace:
    size = len(request)
    return RoutingTrace(
        num_experts=EXPERTS,
        experts=np.array(experts, np.uint8),
        request=np.array(request, np.int64),
        position=np.arange(size, dtype=np.int32),
        step=np.zeros(size, np.int64),
        source_rank=np.zeros(size, np.int32),
        phase=np.zeros(size, np.uint8),
    )


def _stream(runs: list[list[int]]) -> LookupStream:
    return LookupStream(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        ids=np.array([expert for run in runs for expert in run], np.int32),
        offsets=np.cumsum([0] + [len(run) for run in runs]),
    )


def _policy(name: PolicyName) -> EvictionPolicy:
    return EvictionPolicy(name, num_layers=LAYERS, num_experts=EXPERTS, top_k=2, share=0.5)


def _plain_simulate(stream: LookupStream, policy: EvictionPolicy, arena_of: list[int], sizes: list[int]) -> int:
    """The reference of simulate: dictionaries, and the policy's own interface."""
    slots: list[list[tuple[int, int]]] = [[] for _ in sizes]
    hits = 0
    for run in range(len(stream.offsets) - 1):
        layer = run % LAYERS
        needed = stream.ids[stream.offsets[run] : stream.offsets[run + 1]].astype(np.int64)
        policy.observe(layer, needed)
        arena = slots[arena_of[layer]]
        missing = [expert for expert in needed.tolist() if (layer, expert) not in arena]
        hits += len(needed) - len(missing)
        value = dict(zip(arena, policy.values(*_columns(arena)), strict=True))
        for expert in missing:
            if len(arena) == sizes[arena_of[layer]]:
                others = [item for item in arena if item[0] != layer or item[1] not in needed]
                if not others:
                    break
                arena[arena.index(min(others, key=lambda item: value[item]))] = (layer, expert)
            else:
                arena.append((layer, expert))
    return hits


def _columns(items: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.array(items, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


RUNS = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True).map(sorted), min_size=2, max_size=24
).map(lambda runs: runs[: len(runs) // LAYERS * LAYERS])


@pytest.mark.parametrize("name", PolicyName)
@settings(max_examples=25, deadline=None)
@given(runs=RUNS, size=st.integers(1, 5), own=st.booleans())
def test_the_compiled_simulator_does_what_the_plain_one_does(
    name: PolicyName, runs: list[list[int]], size: int, own: bool
) -> None:
    stream = _stream(runs)
    arena_of, sizes = ([0, 1], [size, size]) if own else ([0, 0], [size])
    plain = _plain_simulate(stream, _policy(name), arena_of, sizes)
    assert simulate(stream, _policy(name), np.array(arena_of), np.array(sizes)) == plain


@settings(max_examples=25, deadline=None)
@given(runs=RUNS, size=st.integers(1, 6))
def test_no_policy_hits_more_than_belady(runs: list[list[int]], size: int) -> None:
    stream = _stream(runs)
    best = belady_hits(stream, size)
    for name in PolicyName:
        assert simulate(stream, _policy(name), np.zeros(LAYERS, np.int64), np.array([size])) <= best


@settings(max_examples=20, deadline=None)
@given(experts=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=9), size=st.integers(1, 2))
def test_belady_is_the_optimum_of_all_choices(experts: list[int], size: int) -> None:
    runs = [[expert] for expert in experts for _ in range(LAYERS)]
    items = [(index % LAYERS, run[0]) for index, run in enumerate(runs)]
    best = {frozenset[tuple[int, int]](): 0}
    for item in items:
        after: dict[frozenset[tuple[int, int]], int] = {}
        for held, hits in best.items():
            gained = hits + (item in held)
            full = held | {item}
            kept = [full] if len(full) <= size else [full - {other} for other in held if other != item]
            for choice in kept:
                after[choice] = max(after.get(choice, 0), gained)
        best = after
    assert belady_hits(_stream(runs), size) == max(best.values())


def test_a_cycle_longer_than_the_slots_leaves_lru_without_a_hit_but_not_belady() -> None:
    stream = _stream([[0], [0]] * 10)
    assert simulate(stream, _policy(PolicyName.LRU), np.zeros(2, np.int64), np.array([1])) == 0
    assert belady_hits(_stream([[0, 1], [0, 1]] * 10), 3) > 0


def test_the_layer_with_more_to_gain_gets_more_slots() -> None:
    wide = [[step % 3] if layer == 0 else [0] for step in range(12) for layer in range(LAYERS)]
    assert shares_by_need(_stream(wide), 4).tolist() == [3, 1]
    assert equal_shares(3, 8).tolist() == [2, 3, 3]


def test_streams_take_turns_and_shared_experts_count_once() -> None:
    trace = _trace([[[0, 1], [0, 1]], [[1, 2], [2, 3]], [[3, 0], [0, 1]]], [0, 1, 2])
    stream = make_stream(trace, batch=2, max_steps=10)
    assert stream.num_steps == 1
    assert stream.ids.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_a_batch_without_streams_is_refused() -> None:
    with pytest.raises(ConfigError, match="--batch 0"):
        make_stream(_trace([[[0], [0]]], [0]), batch=0, max_steps=1)


def _habits(tokens: int) -> RoutingTrace:
    """Layer 1 follows layer 0 exactly, and the next token's layer 0 follows this one's."""
    first = np.arange(tokens) % EXPERTS
    experts = np.stack([first, (first + 1) % EXPERTS], axis=1)[:, :, None]
    return _trace(experts.tolist(), (np.arange(tokens) // (tokens // 4)).tolist())


def test_reuse_learns_transitions_that_frequencies_do_not_show() -> None:
    (score,) = score_policies(_habits(4000), shares=[0.5], batches=[1])
    assert score.of_belady("reuse") > 0.95
    assert score.of_belady("lru") == 0.0


def test_scores_are_the_same_in_every_run_and_without_slots_for_each_layer_no_arena_a_layer() -> None:
    first, second = (list(score_policies(_habits(400), shares=[0.1, 1.0], batches=[1])) for _ in range(2))
    assert first == second
    assert BY_NEED not in first[0].policies
    assert all(rate == first[1].belady for rate in first[1].policies.values())


def test_the_chance_of_what_always_follows_is_high() -> None:
    policy = _policy(PolicyName.REUSE)
    for step, layer in itertools.product(range(600), range(LAYERS)):
        policy.observe(layer, np.array([(step + layer) % EXPERTS]))
    before = copy.deepcopy(policy.chances(0))
    assert before.argmax() == 600 % EXPERTS
    assert before.max() > 0.9
