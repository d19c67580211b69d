"""What is compiled of the cache decides as the plain versions do, to the last bit."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cache.finding import HITS, MISSING, NEEDED, by_count, find
from placement.cache.memory import reuse_views
from placement.cache.policy import Candidates, EvictionPolicy, PolicyName
from placement.cache.reuse import far_chances
from placement.cache.vectors import logs_of, to_chances
from tests.placement.plain_reuse import chance, learn, near_logit, value

LAYERS, EXPERTS, SLOTS = 3, 6, 9
IDS = st.lists(st.integers(-1, EXPERTS - 1), max_size=12)
RUNS = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=5, unique=True).map(sorted), max_size=70)
REPEATED = st.tuples(RUNS, st.integers(1, 4)).map(lambda drawn: (drawn[0] * drawn[1])[:90])


def _policy() -> EvictionPolicy:
    return EvictionPolicy(PolicyName.REUSE, num_layers=LAYERS, num_experts=EXPERTS, top_k=2, share=0.4)


@settings(max_examples=60, deadline=None)
@given(runs=REPEATED, seed=st.integers(0, 99), count=st.integers(0, SLOTS))
def test_the_model_of_reuse_learns_values_and_ranks_as_the_plain_one_does(
    runs: list[list[int]], seed: int, count: int
) -> None:
    policy, plain = _policy(), _policy()
    state = reuse_views(plain.memory)
    rng = np.random.default_rng(seed)
    for clock, experts in enumerate(runs):
        policy.observe(clock % LAYERS, np.array(experts))
        learn(state, clock, clock % LAYERS, experts)
    learned = reuse_views(policy.memory)
    for mine, theirs in zip((*learned[:-1], *learned.matching), (*state[:-1], *state.matching), strict=True):
        assert np.array_equal(mine, theirs)
    clock = len(runs) - 1
    now = clock % LAYERS if runs else 0
    cells = rng.permutation(LAYERS * EXPERTS)[:SLOTS]
    layers, experts_in = np.divmod(cells, EXPERTS)
    layers[rng.random(SLOTS) < 0.2] = -1
    free = rng.random(SLOTS) < 0.8
    discount = float(plain.memory.doubles[0])
    values = [
        value(state, discount, clock, now, int(layer), int(expert)) if layer >= 0 else 0.0
        for layer, expert in zip(layers, experts_in, strict=True)
    ]
    filled = np.flatnonzero(layers >= 0)
    assert policy.values(layers[filled], experts_in[filled]).tolist() == [values[slot] for slot in filled]
    order = sorted(np.flatnonzero(free).tolist(), key=lambda slot: (layers[slot] >= 0, values[slot], slot))
    assert policy.rank(layers, experts_in, free, count) == order[:count]
    layer = int(rng.integers(LAYERS))
    distance = (layer - now - 1) % LAYERS + 1
    chances = [chance(near_logit(state, clock, layer, distance, expert)) for expert in range(EXPERTS)]
    assert policy.chances(layer).tolist() == chances


def test_what_several_requests_chose_leaves_the_later_uses_to_frequencies() -> None:
    policy = _policy()
    state = reuse_views(policy.memory)
    state.later_bias[:] = 5.0
    policy.observe(0, np.arange(4))
    policy.observe(1, np.arange(5))
    assert state.later[0].min() > 0.9
    assert state.later[1].tolist() == far_chances(state, 1, state.features[1]).tolist()


@settings(max_examples=30, deadline=None)
@given(runs=RUNS.filter(bool), seed=st.integers(0, 99))
def test_runs_that_are_learned_at_once_teach_what_they_teach_one_by_one(runs: list[list[int]], seed: int) -> None:
    policy, other = _policy(), _policy()
    cells = np.random.default_rng(seed).permutation(LAYERS * EXPERTS)[:SLOTS]
    candidates = Candidates(*np.divmod(cells, EXPERTS), np.ones(SLOTS, bool), 4)
    taught = [(clock % LAYERS, np.array(experts)) for clock, experts in enumerate(runs)]
    ranked = policy.learn(taught, candidates)
    for layer, experts in taught:
        other.observe(layer, experts)
    assert ranked == other.rank(*candidates)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(policy.memory, other.memory, strict=True))


def test_chances_and_logarithms_are_right_to_float32() -> None:
    logits = np.linspace(-30, 30, 4001, dtype=np.float32)
    chances = logits.copy()
    to_chances(chances)
    assert np.allclose(chances, 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=2e-6, atol=0)
    values = np.exp(np.linspace(-80, 80, 4001)).astype(np.float32)
    logs = np.empty_like(values)
    logs_of(values, logs)
    assert np.allclose(logs, np.log(values.astype(np.float64)), rtol=2e-7, atol=2e-7)


def test_a_logit_of_any_size_is_a_chance() -> None:
    chances = np.array([-np.inf, -1e30, -200, 200, 1e30, np.inf], np.float32)
    to_chances(chances)
    assert (chances >= 0).all() and (chances <= 1).all()
    assert chances[:3].max() < 1e-37 and chances[3:].min() == 1


def test_a_policy_that_was_copied_learns_alone() -> None:
    policy = _policy()
    policy.observe(0, np.array([1, 2]))
    other = copy.deepcopy(policy)
    other.observe(1, np.array([3]))
    assert (policy.clock, other.clock) == (1, 2)


@settings(max_examples=100, deadline=None)
@given(chosen=IDS, seed=st.integers(0, 99))
def test_a_lookup_finds_each_expert_once_and_holds_what_is_there(chosen: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    slot_at = np.full((LAYERS, EXPERTS + 1), -1)
    slot_at[:, :-1][rng.random((LAYERS, EXPERTS)) < 0.4] = 0
    places = np.argwhere(slot_at >= 0)
    slot_at[slot_at >= 0] = rng.permutation(len(places))
    held, stirring = np.zeros(len(places), bool), rng.random(len(places)) < 0.5
    found = np.full((3, EXPERTS + 1), 7)
    needed, hits, busy = find(slot_at, held, stirring, 1, np.array(chosen, np.int64), found)
    wanted = sorted(set(chosen) - {-1})
    there = [expert for expert in wanted if slot_at[1, expert] >= 0]
    assert found[NEEDED, :needed].tolist() == wanted
    assert found[HITS, :hits].tolist() == there
    assert found[MISSING, : needed - hits].tolist() == [expert for expert in wanted if expert not in there]
    assert sorted(np.flatnonzero(held)) == sorted(slot_at[1, there])
    assert busy == sum(stirring[slot_at[1, there]])


@settings(max_examples=60, deadline=None)
@given(ids=IDS)
def test_what_most_tokens_will_need_is_named_first(ids: list[int]) -> None:
    counts = Counter(expert for expert in ids if expert >= 0)
    expected = sorted(counts, key=lambda expert: (-counts[expert], expert))
    assert by_count(np.array(ids, np.int64), EXPERTS).tolist() == expected
