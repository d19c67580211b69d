"""A policy that learns in a thread of its own: whoever asks it anything gets what it knows by then."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from placement.cache.policy import Candidates, EvictionPolicy, PolicyName
from workers.learner import Learner

LAYERS, EXPERTS, SLOTS = 3, 8, 10


def _policy() -> EvictionPolicy:
    return EvictionPolicy(PolicyName.REUSE, num_layers=LAYERS, num_experts=EXPERTS, top_k=2, share=0.4)


def _runs(count: int) -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng(count)
    return [(clock % LAYERS, np.sort(rng.permutation(EXPERTS)[:2])) for clock in range(count)]


def _candidates() -> Candidates:
    layers, experts = np.divmod(np.arange(SLOTS) * 2, EXPERTS)
    return Candidates(layers, experts, np.ones(SLOTS, bool), 3)


def test_whoever_asks_waits_until_what_was_begun_is_learned() -> None:
    plain, policy = _policy(), _policy()
    learner = Learner(policy)
    for layer, experts in _runs(400):
        plain.observe(layer, experts)
    layers, experts_in, _, _ = _candidates()
    for ask in (
        lambda each: each.values(layers, experts_in).tolist(),
        lambda each: each.chances(1).tolist(),
        lambda each: each.observe(0, np.arange(2)),
    ):
        begun = learner.begin(_runs(400), _candidates())
        expected = plain.rank(*_candidates())
        assert ask(learner) == ask(plain)
        assert begun.result() == expected
        for layer, experts in _runs(400):
            plain.observe(layer, experts)
    learner.begin(_runs(400))
    assert learner.rank(_candidates()) == plain.rank(*_candidates())
    learner.close()


def test_what_is_begun_is_learned_in_its_order() -> None:
    plain, policy = _policy(), _policy()
    learner = Learner(policy)
    for count in (50, 3, 20):
        learner.begin(_runs(count))
        plain.learn(_runs(count))
    learner.wait()
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(policy.memory, plain.memory, strict=True))
    learner.close()


def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for() -> None:
    learner = Learner(_policy())
    learner.begin([(0, None)])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        learner.wait()
    learner.wait()
    learner.close()


def test_the_thread_begins_when_it_is_needed_and_ends() -> None:
    before = threading.active_count()
    learner = Learner(_policy())
    learner.observe(0, np.arange(2))
    assert threading.active_count() == before
    learner.begin(_runs(3))
    assert threading.active_count() == before + 1
    learner.close()
    assert threading.active_count() == before
