"""Steps that are as earlier ones: which are found, and what follows from them."""

from __future__ import annotations

import numpy as np
import pytest

from placement.cache.matching import HISTORY_STEPS, LONGEST, NUM_LENGTHS, SEARCH_STEPS, Matching, class_of
from placement.cache.memory import reuse_views
from placement.cache.policy import EvictionPolicy, PolicyName

LAYERS, EXPERTS = 2, 40


def _told(steps: list[list[int]]) -> EvictionPolicy:
    """A policy whose layers all chose these experts, step after step."""
    policy = EvictionPolicy(PolicyName.REUSE, num_layers=LAYERS, num_experts=EXPERTS, top_k=2, share=0.5)
    for experts in steps:
        for layer in range(LAYERS):
            policy.observe(layer, np.array(experts))
    return policy


def _matching(steps: list[list[int]]) -> Matching:
    return reuse_views(_told(steps).memory).matching


def test_a_step_matches_where_most_steps_before_it_were_the_same() -> None:
    a, b, c, d = [0, 39], [1, 38], [2, 37], [3, 36]
    matching = _matching([a, b, c, d, b, c, a, a, b, c])
    assert matching.back[:10].tolist() == [0, 0, 0, 0, 3, 3, 6, 1, 7, 7]
    assert matching.length[:10].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1, 2]


def test_of_matches_of_one_length_the_latest_is_taken() -> None:
    matching = _matching([[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]])
    assert matching.back[:5].tolist() == [0, 0, 2, 0, 2]


def test_experts_of_several_requests_are_matched_with_nothing() -> None:
    crowd = [0, 1, 2, 3, 4]
    matching = _matching([crowd, crowd, [1, 2], crowd, [1, 2]])
    assert matching.back[:5].tolist() == [0, 0, 0, 0, 2]


@pytest.mark.parametrize(("steps", "back"), [(SEARCH_STEPS, SEARCH_STEPS), (SEARCH_STEPS + 1, 0)])
def test_what_lies_further_back_than_is_remembered_is_not_matched(steps: int, back: int) -> None:
    matching = _matching([[1, 2], *([[step % 39, 39] for step in range(steps - 1)]), [1, 2]])
    assert matching.back[steps] == back


def test_memory_reaches_as_far_as_what_is_matched_and_learned_from() -> None:
    assert HISTORY_STEPS - SEARCH_STEPS > LONGEST + 12


def test_lengths_are_classed_by_doubling() -> None:
    lengths = [1, 2, 3, 4, 7, 8, 15, 16, 31, LONGEST]
    assert [class_of(length) for length in lengths] == [0, 1, 2, 3, 3, 4, 4, 5, 5, NUM_LENGTHS - 1]


def test_a_text_that_comes_again_is_foreseen() -> None:
    rng = np.random.default_rng(0)
    text = [sorted(rng.choice(EXPERTS, 2, replace=False).tolist()) for _ in range(60)]
    policy = _told([*text, *text[:30]])
    chances = policy.chances(0)
    assert sorted(np.argsort(chances)[-2:].tolist()) == text[30]
    later = reuse_views(policy.memory).later[0]
    assert later[text[31]].min() > np.median(later)
