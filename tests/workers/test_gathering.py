"""The exchange that gives every token to every rank: the same sums as the other, no counts told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from placement.errors import ExchangeError, StaleEpochError
from tests.workers.ranks import CPU, meet, run_ranks
from workers.gathering import GatherExchange, is_worth_gathering

HIDDEN, TOP_K, NUM_EXPERTS, CAPACITY = 4, 3, 8, 3
EXPERTS = torch.tensor([[0, 1, 5], [5, 6, 7]])
RANKS = torch.tensor([[0, 0, 1], [1, 1, 1]], dtype=torch.int32)


def exchange(rank: int, mail: Any) -> dict[str, Any]:
    groups = meet(rank, mail)
    link = GatherExchange(
        groups.data, rank=rank, num_ranks=2, num_experts=NUM_EXPERTS, partial_dtype=torch.float64, device=CPU
    )
    num_tokens = 2 if rank == 0 else 0
    hidden = torch.arange(num_tokens * HIDDEN, dtype=torch.float32).view(num_tokens, HIDDEN)
    tokens = {
        "hidden": hidden,
        "experts": EXPERTS[:num_tokens].numpy(),
        "weights": torch.full((num_tokens, TOP_K), 0.5),
        "ranks": RANKS[:num_tokens].numpy(),
    }
    plan, arrivals = link.dispatch(epoch=3, **tokens, capacity=CAPACITY)
    partial = arrivals.hidden.double() * (arrivals.experts >= 0).sum(dim=1, keepdim=True)
    partial[(arrivals.experts < 0).all(dim=1)] = 0
    returned = link.combine(plan, partial, num_tokens)
    refused = {}
    for name, change in {"epoch": {"epoch": 3 + rank, "capacity": 3}, "room": {"epoch": 3, "capacity": 1}}.items():
        try:
            # The rank without tokens must not wait for one that refuses before it calls.
            if name == "epoch" or rank == 0:
                link.dispatch(**tokens, **change)
        except (StaleEpochError, ExchangeError) as error:
            refused[name] = str(error)
    needed = (arrivals.experts >= 0).any(dim=1)
    seen = {
        "arrived": arrivals.hidden[needed].tolist(),
        "experts": arrivals.experts[needed].tolist(),
        "weights": arrivals.weights[needed].tolist(),
        "rows": len(arrivals.hidden),
        "returned": returned.tolist(),
        "refused": refused,
    }
    groups.leave()
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(exchange, 2)


def test_every_rank_has_a_row_for_each_token_that_any_rank_may_have(seen: list[dict[str, Any]]) -> None:
    assert [each["rows"] for each in seen] == [2 * CAPACITY] * 2


def test_each_rank_finds_its_own_experts_of_every_token(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["arrived"] == [[0, 1, 2, 3]]
    assert seen[0]["experts"] == [[0, 1, -1]]
    assert seen[1]["arrived"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert seen[1]["experts"] == [[-1, -1, 5], [5, 6, 7]]
    assert seen[1]["weights"] == [[0.5] * 3] * 2


def test_the_sums_come_home(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["returned"] == [[0, 3, 6, 9], [12, 15, 18, 21]]
    assert seen[1]["returned"] == []


def test_a_peer_of_another_epoch_is_refused_by_both(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["refused"]["epoch"] == "this rank serves epoch 3, but rank 1 serves 4"
    assert seen[1]["refused"]["epoch"] == "this rank serves epoch 4, but rank 0 serves 3"


def test_more_tokens_than_the_ranks_agreed_on_are_refused(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["refused"]["room"] == "this rank has 2 tokens in a step of at most 1"


def test_it_pays_where_most_tokens_go_to_most_ranks_of_one_node() -> None:
    assert is_worth_gathering(num_ranks=2, num_nodes=1, top_k=4)
    assert is_worth_gathering(num_ranks=8, num_nodes=1, top_k=8)
    assert not is_worth_gathering(num_ranks=32, num_nodes=1, top_k=8)
    assert not is_worth_gathering(num_ranks=2, num_nodes=2, top_k=8)
    assert not is_worth_gathering(num_ranks=1, num_nodes=1, top_k=8)
