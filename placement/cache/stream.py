"""LookupStream: the lookups of a served model, step after step, layer after layer, made from a routing trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.errors import ConfigError
from placement.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupStream:
    """ids [n] int32 experts, offsets [steps * L + 1]: layer l of step s looks up ids[offsets[s * L + l] : ...].

    The ids of one layer and step are distinct and ascending.
    """

    num_layers: int
    num_experts: int
    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // self.num_layers

    @property
    def num_lookups(self) -> int:
        return len(self.ids)


def make_stream(trace: RoutingTrace, *, batch: int, max_steps: int) -> LookupStream:
    """Serve a trace's requests as `batch` concurrent streams of decode, one token of each per step.

    A stream that ends takes the next request, in ascending order of requests; what is left when fewer than `batch`
    streams remain is not used, unless there are fewer requests than streams. Raises ConfigError where batch < 1.
    """
    if batch < 1:
        raise ConfigError(f"--batch {batch}: at least one stream is needed")
    chosen = trace.experts[_schedule(trace, batch, max_steps)]
    steps, width, layers, top_k = chosen.shape
    rows = np.sort(chosen.transpose(0, 2, 1, 3).reshape(steps * layers, width * top_k), axis=1)
    first = np.ones(rows.shape, bool)
    first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    offsets = np.zeros(steps * layers + 1, np.int64)
    np.cumsum(first.sum(axis=1), out=offsets[1:])
    return LookupStream(
        num_layers=layers, num_experts=trace.num_experts, ids=rows[first].astype(np.int32), offsets=offsets
    )


def _schedule(trace: RoutingTrace, batch: int, max_steps: int) -> NDArray[np.int64]:
    """The token of each step and stream, [steps, batch]."""
    order = np.lexsort((trace.position, trace.request))
    starts = np.flatnonzero(np.r_[True, np.diff(trace.request[order]) != 0])
    waiting = [part.tolist() for part in np.split(order, starts[1:])][::-1]
    width = min(batch, len(waiting))
    running = [waiting.pop()[::-1] for _ in range(width)]
    steps: list[list[int]] = []
    while len(steps) < max_steps:
        steps.append([tokens.pop() for tokens in running])
        running = [tokens if tokens else (waiting.pop()[::-1] if waiting else []) for tokens in running]
        if not all(running):
            break
    return np.array(steps, np.int64)
