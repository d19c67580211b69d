"""Requests: what is asked of a rank, and what it refuses before the engine sees it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from placement.errors import RequestError

MAX_TEMPERATURE = 2.0
_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw a request's tokens. temperature: 0 excluded, which is greedy and needs no Sampling. seed: 64 bits."""

    temperature: float
    seed: int
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= MAX_TEMPERATURE:
            raise RequestError(f"temperature is {self.temperature}; it must be above 0 and at most {MAX_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.seed not in _SEEDS:
            raise RequestError(f"seed is {self.seed}; it must be an integer of 64 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, as token ids, to continue; greedily where there is no sampling.

    stream: an event a token instead of one at the end.
    """

    request: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stream: bool = False
    sampling: Sampling | None = None


def check_request(request: GenerationRequest, *, vocabulary: int, max_tokens: int) -> None:
    """Raises RequestError for what would break the batch that it lands in."""
    name = f"request '{request.request}'"
    if not request.prompt:
        raise RequestError(f"{name}: the prompt is empty")
    if request.max_new_tokens < 1:
        raise RequestError(f"{name}: max_new_tokens is {request.max_new_tokens}; it must be 1 or more")
    wrong = next((token for token in request.prompt if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise RequestError(f"{name}: token {wrong} is not in the vocabulary (0 to {vocabulary - 1})")
    total = len(request.prompt) + request.max_new_tokens
    if total > max_tokens:
        raise RequestError(
            f"{name}: {len(request.prompt)} prompt tokens + {request.max_new_tokens} new ones are {total}, "
            f"more than the {max_tokens} that fit"
        )


def request_number(request: str) -> int:
    """A request's id in traces: the number itself where the id is one, else 63 bits of a hash."""
    if request.isdecimal() and len(request) < 19:
        return int(request)
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "big") >> 1
