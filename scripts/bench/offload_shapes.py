"""Shapes of experts for `offload.py`, and routing for them: made from one trace, the same for everyone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The experts of a model, or of a slice of it: hidden and intermediate size, and routing."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_layers: int


SHAPES = {
    "olmoe": Shape(hidden=2048, intermediate=1024, num_experts=64, top_k=8, num_layers=12),
    "qwen3": Shape(hidden=2048, intermediate=768, num_experts=128, top_k=8, num_layers=12),
    "mixtral": Shape(hidden=4096, intermediate=14336, num_experts=8, top_k=2, num_layers=2),
}


def routing_for(trace: RoutingTrace, shape: Shape) -> RoutingTrace:
    """A trace of 64 experts and 8 a token as one of this shape.

    More experts: a request uses one of two for each that the trace names, drawn by request, layer and expert. Fewer:
    neighbours are one, and a token uses the first top_k distinct ones that it names.
    """
    chosen = trace.experts[:, : shape.num_layers].astype(np.int64)
    if shape.num_experts > trace.num_experts:
        times = shape.num_experts // trace.num_experts
        layer = np.arange(chosen.shape[1])[None, :, None]
        mixed = (trace.request[:, None, None] * 1_000_003 + layer * 10_007 + chosen) * 2_654_435_761
        chosen = chosen * times + (mixed >> 17) % times
    elif shape.num_experts < trace.num_experts:
        chosen = _merged(chosen // (trace.num_experts // shape.num_experts), shape.top_k, shape.num_experts)
    experts = chosen.astype(trace.experts.dtype)
    return replace(trace, num_experts=shape.num_experts, experts=experts, gate_weight=None, layers=None)


def _merged(groups: NDArray[np.int64], top_k: int, num_experts: int) -> NDArray[np.int64]:
    """The first top_k distinct groups of each token and layer; where they name fewer, the ones after the first."""
    found = np.zeros((*groups.shape[:2], top_k), np.int64)
    found[..., 0] = groups[..., 0]
    for place in range(1, top_k):
        before = found[..., :place]
        new = (groups[..., :, None] != before[..., None, :]).all(axis=-1)
        first = new.argmax(axis=-1)
        named = np.take_along_axis(groups, first[..., None], axis=-1)[..., 0]
        found[..., place] = np.where(new.any(axis=-1), named, (before[..., -1] + 1) % num_experts)
    return found
