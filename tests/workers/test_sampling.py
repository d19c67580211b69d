"""Drawing tokens: the distribution, the nucleus, seeds, and rows that must not touch each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import LogitsProcessorList

from placement.errors import RequestError
from workers.requests import Sampling
from workers.sampling import Draw, RowSampler, draw_tokens, uniform

SCORES = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 5.0]])


def _draws(row: int, count: int, **how: float) -> list[Draw]:
    return [Draw(row, Sampling(seed=7, **{"temperature": 1.0} | how), position) for position in range(count)]


def test_tokens_come_as_often_as_the_softmax_says() -> None:
    tokens = draw_tokens(SCORES, _draws(0, 20_000))
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert torch.allclose(shares, torch.softmax(SCORES[0], 0), atol=0.012)


def test_a_low_temperature_is_all_but_greedy() -> None:
    assert set(draw_tokens(SCORES, _draws(0, 500, temperature=0.05)).tolist()) == {0}


def test_the_lowest_temperature_there_is_still_draws_the_likeliest_token() -> None:
    assert set(draw_tokens(SCORES, _draws(0, 20, temperature=5e-324)).tolist()) == {0}


def test_top_p_keeps_the_fewest_likeliest_tokens_that_hold_it() -> None:
    # 0.64, 0.24, 0.09, 0.03: the first alone holds 0.6, the first two 0.7.
    assert set(draw_tokens(SCORES, _draws(0, 500, top_p=0.6)).tolist()) == {0}
    assert set(draw_tokens(SCORES, _draws(0, 500, top_p=0.7)).tolist()) == {0, 1}


def test_a_tiny_top_p_still_keeps_the_likeliest_token() -> None:
    assert set(draw_tokens(SCORES, _draws(1, 100, top_p=1e-9)).tolist()) == {3}


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_the_random_number_is_in_the_unit_interval_and_the_same_each_time(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


def test_seeds_and_positions_give_numbers_of_their_own() -> None:
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 1000))
def test_a_draw_does_not_depend_on_the_batch_around_it(rows: int, row: int, seed: int) -> None:
    scores = torch.randn(rows, 50, generator=torch.Generator().manual_seed(rows))
    mine = Draw(row % rows, Sampling(temperature=0.8, seed=seed, top_p=0.9), 3)
    others = [Draw(other, Sampling(temperature=1.5, seed=1), 9) for other in range(rows) if other != mine.row]
    together = draw_tokens(scores, [*others, mine])[-1]
    alone = draw_tokens(scores[mine.row : mine.row + 1], [Draw(0, mine.sampling, mine.position)])[0]
    assert together == alone


class _Request:
    """What the engine shows of a request in a batch."""

    def __init__(self, sampling: Sampling | None, *, has_new_token: bool = True) -> None:
        self.state = self
        self.has_new_token = has_new_token
        self.initial_tokens = [1, 2, 3]
        self.generated_tokens = [4]
        self.logit_processor_kwargs = {"sampling": sampling}


def test_greedy_rows_keep_their_scores_to_the_bit() -> None:
    sampler = RowSampler(LogitsProcessorList())
    chosen = Sampling(temperature=1.0, seed=3)
    batch = [_Request(None, has_new_token=False), _Request(None), _Request(chosen)]
    sampler.prepare_tensor_args(batch, torch.empty(0, 3))
    assert sampler.do_processing
    scores = sampler(torch.tensor([1, 2]), SCORES.clone(), torch.empty(0, 2))
    assert torch.equal(scores[0], SCORES[0])
    assert scores[1].argmax() == draw_tokens(SCORES, [Draw(1, chosen, 4)])[0]


def test_a_batch_of_greedy_requests_is_not_processed_at_all() -> None:
    sampler = RowSampler(LogitsProcessorList())
    sampler.prepare_tensor_args([_Request(None)], torch.empty(0, 1))
    assert not sampler.do_processing


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"temperature": 2.5}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_a_sampling_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Sampling(**{"temperature": 1.0, "seed": 1} | wrong)


def test_a_seed_beyond_64_bits_is_refused() -> None:
    with pytest.raises(RequestError, match="64 bits"):
        Sampling(temperature=1.0, seed=2**63)
