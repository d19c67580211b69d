"""Steps drawn from a trace: decode batches mix all requests, prefill batches hold whole runs of few requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.errors import ConfigError
from placement.stepcounts import Steps
from placement.trace import DECODE, PREFILL, RoutingTrace

NAMES = {DECODE: "decode", PREFILL: "prefill"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTokens:
    """The tokens of a trace that stand for a phase: index [n]. stand_in: the trace has none of it; these are others."""

    phase: int
    index: NDArray[np.int64]
    stand_in: bool

    def only(self, places: NDArray[np.int64]) -> PhaseTokens:
        """Those at places [m] of the index."""
        return replace(self, index=self.index[places])


def phase_tokens(trace: RoutingTrace, phase: int) -> PhaseTokens:
    """The trace's tokens of one phase, or all of its tokens where it knows none of that phase."""
    own = np.flatnonzero(trace.phase == phase)
    stand_in = len(own) == 0
    return PhaseTokens(phase=phase, index=np.arange(trace.num_tokens) if stand_in else own, stand_in=stand_in)


def draw_steps(
    trace: RoutingTrace, tokens: PhaseTokens, batch: int, most_tokens: int, rng: np.random.Generator
) -> Steps:
    """Steps of batch tokens, about most_tokens in all and one step at least.

    Decode: tokens drawn at random over all requests. Prefill: requests in random order, each one's tokens by position,
    cut into batches. No token is used twice before all have been used once; a batch larger than the trace repeats it.
    Raises ConfigError for a batch below 1.
    """
    if batch < 1:
        raise ConfigError(f"a batch needs 1 token or more, got {batch}")
    num_steps = max(1, min(most_tokens, len(tokens.index)) // batch)
    wanted = num_steps * batch
    turns = -(-wanted // len(tokens.index))
    order = _decode_order if tokens.phase == DECODE else _prefill_order
    index = np.concatenate([order(trace, tokens.index, rng) for _ in range(turns)])[:wanted]
    return Steps(index=index, bounds=np.arange(num_steps + 1, dtype=np.int64) * batch)


def _decode_order(trace: RoutingTrace, index: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    return rng.permutation(index)


def _prefill_order(trace: RoutingTrace, index: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    _, owner = np.unique(trace.request[index], return_inverse=True)
    place = rng.permutation(int(owner.max()) + 1)
    order: NDArray[np.int64] = index[np.lexsort((trace.position[index], place[owner]))]
    return order


def recorded_steps(step: NDArray[np.int64]) -> tuple[NDArray[np.int64], Steps]:
    """The steps as they really were: step [T] as recorded -> (step numbers [S] ascending, Steps)."""
    numbers, counts = np.unique(step, return_counts=True)
    index = np.argsort(step, kind="stable")
    return numbers, Steps(index=index, bounds=np.r_[0, np.cumsum(counts)].astype(np.int64))


def group_requests(request: NDArray[np.int64], most_groups: int, seed: int = 0) -> NDArray[np.int32]:
    """Deal requests at random into groups of nearly equal number: group [T], at most most_groups of them."""
    requests, owner = np.unique(request, return_inverse=True)
    num_groups = min(most_groups, len(requests))
    dealt = np.random.default_rng(seed).permutation(len(requests)) % num_groups
    group: NDArray[np.int32] = dealt[owner].astype(np.int32)
    return group
