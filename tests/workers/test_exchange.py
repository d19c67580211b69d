"""The exchange between two real ranks: what travels, what comes back, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from placement.errors import StaleEpochError
from tests.workers.ranks import meet, run_ranks
from workers.exchange import Exchange

HIDDEN, TOP_K = 4, 3
# Token 0 of rank 0 needs both ranks, token 1 only rank 1 (three times); rank 1 has no tokens.
EXPERTS = torch.tensor([[0, 1, 5], [5, 6, 7]])
RANKS = torch.tensor([[0, 0, 1], [1, 1, 1]])


def exchange(rank: int, mail: Any) -> dict[str, Any]:
    groups = meet(rank, mail)
    link = Exchange(groups.data, num_ranks=2, partial_dtype=torch.float64)
    num_tokens = 2 if rank == 0 else 0
    hidden = torch.arange(num_tokens * HIDDEN, dtype=torch.float32).view(num_tokens, HIDDEN)
    experts, ranks = EXPERTS[:num_tokens].numpy(), RANKS[:num_tokens].numpy()
    weights = torch.full((num_tokens, TOP_K), 0.5)
    plan, arrivals = link.dispatch(epoch=3, hidden=hidden, experts=experts, weights=weights, ranks=ranks)
    partial = arrivals.hidden.double() * (arrivals.experts >= 0).sum(dim=1, keepdim=True)
    returned = link.combine(plan, partial, num_tokens)
    try:
        link.dispatch(epoch=3 + rank, hidden=hidden, experts=experts, weights=weights, ranks=ranks)
        refused = ""
    except StaleEpochError as error:
        refused = str(error)
    seen = {
        "arrived": arrivals.hidden.tolist(),
        "experts": arrivals.experts.tolist(),
        "weights": arrivals.weights.tolist(),
        "returned": returned.tolist(),
        "sent_rows": link.sent_rows,
        "refused": refused,
    }
    groups.leave()
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(exchange, 2)


def test_a_token_goes_once_to_each_rank_that_needs_it(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["arrived"] == [[0, 1, 2, 3]]
    assert seen[1]["arrived"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert seen[0]["sent_rows"] >= 3


def test_each_rank_is_told_its_own_experts_of_a_token_alone(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["experts"] == [[0, 1, -1]]
    assert seen[1]["experts"] == [[-1, -1, 5], [5, 6, 7]]
    assert seen[1]["weights"] == [[0.5] * 3] * 2


def test_one_sum_a_rank_comes_home(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["returned"] == [[0, 3, 6, 9], [12, 15, 18, 21]]
    assert seen[1]["returned"] == []


def test_a_peer_of_another_epoch_is_refused_by_both(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["refused"] == "this rank serves epoch 3, but rank 1 serves 4"
    assert seen[1]["refused"] == "this rank serves epoch 4, but rank 0 serves 3"
