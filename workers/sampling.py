"""Sampling by request: a temperature, a top_p and a seed of its own, whatever batch a token is computed in.

A draw is a pure function of the scores, the request's seed and the token's place in its sequence. So a request with a
seed is written alike beside any other requests, and goes on alike on another rank from the tokens that it has.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.logits_process import LogitsProcessorList

from workers.requests import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to draw: its row of the scores, how, and its place in its sequence (the prompt counts)."""

    row: int
    sampling: Sampling
    position: int


def draw_tokens(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw one token for each draw from scores [rows, vocabulary]; int64 [draws].

    By inverse distribution in float64, over the fewest likeliest tokens that hold top_p of the probability (Holtzman et
    al. 2020): scores that differ in their last bits, as they do between batches, then give the same token.
    """
    device = scores.device
    rows = torch.tensor([draw.row for draw in draws], device=device)
    temperature = torch.tensor([draw.sampling.temperature for draw in draws], dtype=torch.float64, device=device)
    top_p = torch.tensor([draw.sampling.top_p for draw in draws], dtype=torch.float64, device=device)
    point = torch.tensor(
        [uniform(draw.sampling.seed, draw.position) for draw in draws], dtype=torch.float64, device=device
    )
    # The likeliest at 0: any temperature above 0 then divides to a number, never to infinity minus infinity.
    below = scores[rows].double()
    below = below - below.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(below / temperature[:, None], dim=-1)
    ranked, token_ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    reached = ranked.cumsum(dim=-1)
    kept = torch.where(reached - ranked < top_p[:, None], ranked, 0.0).cumsum(dim=-1)
    place = torch.searchsorted(kept, (point * kept[:, -1])[:, None], right=True).clamp(max=scores.shape[-1] - 1)
    return token_ids.gather(1, place).squeeze(1)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the two alone: 53 bits of BLAKE2."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


class RowSampler(ContinuousBatchingLogitsProcessorList):
    """Takes the place of the manager's processors: after these, it leaves a drawn row nothing but its drawn token.

    The engine goes on to take each row's argmax, so greedy rows stay what they are, to the bit.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        super().__init__(processors)
        self._others = len(self.logits_processor) > 0
        self._draws: list[Draw] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """The engine asks whether a request's keywords are known; ours are."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self._draws = [
            Draw(row, sampling, len(state.initial_tokens) + len(state.generated_tokens))
            for row, state in enumerate(states)
            if (sampling := state.logit_processor_kwargs.get("sampling")) is not None
        ]
        self.do_processing = self._others or bool(self._draws)
        storage: torch.Tensor = super().prepare_tensor_args(requests_in_batch, arg_storage)
        return storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        if self._others:
            scores = super().__call__(input_ids, scores, logits_processor_args)
        if self._draws:
            tokens = draw_tokens(scores, self._draws)
            rows = torch.tensor([draw.row for draw in self._draws], device=scores.device)
            scores[rows] = -torch.inf
            scores[rows, tokens] = 0.0
        return scores
