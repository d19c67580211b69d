"""Which experts tokens choose as a request goes on: position by expert, for each kind of request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.trace import DECODE, PREFILL, RoutingTrace

MAX_KINDS, MAX_BINS, MAX_CELLS = 8, 20, 140_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """share [kinds, layers, bins, E]: the part of a bin's tokens that chose an expert; NaN where there is no token.

    kinds: names from the trace; layers: which; edges [bins + 1]: a bin holds positions from its edge up to the next.
    tokens [kinds]; left_out: kinds with fewer tokens, that are not shown.
    """

    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    edges: NDArray[np.int64]
    tokens: tuple[int, ...]
    share: NDArray[np.float32]
    left_out: int

    @property
    def bins(self) -> list[str]:
        """Each bin in words: '0-15'."""
        starts, ends = self.edges[:-1].tolist(), (self.edges[1:] - 1).tolist()
        return [f"{start}-{end}" if end > start else str(start) for start, end in zip(starts, ends, strict=True)]


def count_activation(trace: RoutingTrace) -> Activation:
    """Bins of about the same number of tokens each; layers evenly spread, as many as fit."""
    kind, names = kinds_of(trace)
    counts = np.bincount(kind, minlength=len(names))
    busiest = [index for index in np.argsort(-counts, kind="stable").tolist() if counts[index]]
    shown = sorted(busiest[:MAX_KINDS])
    edges = _edges(trace.position)
    bins = np.searchsorted(edges, trace.position, side="right") - 1
    cells = len(shown) * (len(edges) - 1) * trace.num_experts
    layers = evenly(trace.num_layers, MAX_CELLS // cells)
    share = np.stack([[_shares(trace, layer, kind == one, bins, len(edges) - 1) for layer in layers] for one in shown])
    return Activation(
        kinds=tuple(names[one] for one in shown),
        layers=tuple(layers),
        edges=edges,
        tokens=tuple(int(counts[one]) for one in shown),
        share=share,
        left_out=len(busiest) - len(shown),
    )


def kinds_of(trace: RoutingTrace) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The kind of each token [T] and the kinds' names: workloads, else phases, else one kind of all requests."""
    if trace.workload is not None:
        largest = int(trace.workload.max())
        names = trace.workload_names + tuple(
            f"workload {number}" for number in range(len(trace.workload_names), largest + 1)
        )
        return trace.workload.astype(np.int64), names
    if len(np.unique(trace.phase)) > 1:
        return np.where(trace.phase == PREFILL, 1, 0), ("decode", "prefill")
    return np.zeros(trace.num_tokens, np.int64), ("decode" if trace.phase[0] == DECODE else "prefill",)


def evenly(count: int, most: int) -> list[int]:
    """Up to `most` (at least one) of 0 .. count - 1, evenly spread, the first and the last among them."""
    return sorted({int(index) for index in np.linspace(0, count - 1, max(1, min(most, count)))})


def _edges(position: NDArray[np.int32]) -> NDArray[np.int64]:
    cuts = np.quantile(position, np.linspace(0, 1, MAX_BINS + 1)[:-1], method="lower").astype(np.int64)
    return np.append(np.unique(cuts), int(position.max()) + 1)


def _shares(
    trace: RoutingTrace, layer: int, chosen: NDArray[np.bool_], bins: NDArray[np.intp], num_bins: int
) -> NDArray[np.float32]:
    """[bins, E] of the chosen tokens."""
    cell = bins[chosen, None] * trace.num_experts + trace.experts[chosen, layer].astype(np.int64)
    counts = np.bincount(cell.ravel(), minlength=num_bins * trace.num_experts).reshape(num_bins, -1)
    tokens = np.bincount(bins[chosen], minlength=num_bins)[:, None]
    return np.where(tokens > 0, counts / np.maximum(1, tokens), np.nan).astype(np.float32)
