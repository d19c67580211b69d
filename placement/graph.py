"""The affinity graph of a routing trace: how often experts are used, used together, and used one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx as nx
import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityGraph:
    """Counts over the tokens of a trace.

    load [L, E]: tokens that chose an expert.
    coactivation [L, E, E]: tokens that chose both of a pair in one layer; symmetric, zero diagonal.
    transition [L-1, E, E]: tokens that chose i in layer l and j in layer l + 1.
    demand [sources, L, E]: load by source (a home, a request, a workload), one source unless told apart.
    """

    num_tokens: int
    load: NDArray[np.int64]
    coactivation: NDArray[np.int32]
    transition: NDArray[np.int32]
    demand: NDArray[np.int64]

    def __post_init__(self) -> None:
        layers, experts = self.load.shape
        assert self.coactivation.shape == (layers, experts, experts)
        assert self.transition.shape == (layers - 1, experts, experts)
        assert self.demand.shape[1:] == (layers, experts)

    def to_networkx(self, layer: int) -> nx.Graph:
        """One layer as a graph: node attribute `load`, edge attribute `weight` (co-activation), no zero edges."""
        graph = nx.Graph(layer=layer)
        graph.add_nodes_from((expert, {"load": int(load)}) for expert, load in enumerate(self.load[layer]))
        rows, columns = np.nonzero(np.triu(self.coactivation[layer]))
        weights = self.coactivation[layer][rows, columns]
        graph.add_weighted_edges_from(zip(rows.tolist(), columns.tolist(), weights.tolist(), strict=True))
        return graph


@nb.njit(cache=True, nogil=True)
def _count_demand(chosen: Any, source: Any, demand: Any) -> None:
    for token in range(chosen.shape[0]):
        for expert in chosen[token]:
            demand[source[token], expert] += 1


@nb.njit(cache=True, nogil=True)
def _count_pairs(chosen: Any, pairs: Any) -> None:
    num_tokens, top_k = chosen.shape
    for token in range(num_tokens):
        for one in range(top_k):
            for two in range(one + 1, top_k):
                pairs[chosen[token, one], chosen[token, two]] += 1


@nb.njit(cache=True, nogil=True)
def _count_steps(before: Any, after: Any, steps: Any) -> None:
    num_tokens, top_k = before.shape
    for token in range(num_tokens):
        for one in range(top_k):
            for two in range(top_k):
                steps[before[token, one], after[token, two]] += 1


def count_load(trace: RoutingTrace, source: NDArray[np.int64] | None = None, num_sources: int = 1) -> NDArray[np.int64]:
    """Tokens that chose each expert: [sources, L, E]. source [T] names each token's source, all 0 unless given."""
    demand = np.zeros((num_sources, trace.num_layers, trace.num_experts), np.int64)
    sources = np.zeros(trace.num_tokens, np.int64) if source is None else source
    for layer in range(trace.num_layers):
        _count_demand(np.ascontiguousarray(trace.experts[:, layer]), sources, demand[:, layer])
    return demand


def count_coactivation(chosen: NDArray[Any], num_experts: int) -> NDArray[np.int32]:
    """Count the tokens that chose both experts of each pair.

    chosen: [T, K] logical expert ids of one layer. Returns [E, E], symmetric, zero diagonal.
    """
    pairs = np.zeros((num_experts, num_experts), np.int32)
    _count_pairs(np.ascontiguousarray(chosen), pairs)
    both: NDArray[np.int32] = pairs + pairs.T
    np.fill_diagonal(both, 0)
    return both


def count_transition(before: NDArray[Any], after: NDArray[Any], num_experts: int) -> NDArray[np.int32]:
    """Count the tokens that chose i in one layer and j in the next: before, after [T, K]. Returns [E, E]."""
    steps = np.zeros((num_experts, num_experts), np.int32)
    _count_steps(np.ascontiguousarray(before), np.ascontiguousarray(after), steps)
    return steps


def build_graph(
    trace: RoutingTrace, source: NDArray[np.int64] | None = None, num_sources: int = 1, *, transitions: bool = True
) -> AffinityGraph:
    """Count the whole graph. source [T] as in `count_load`; without transitions those counts stay zero."""
    layers, experts = trace.num_layers, trace.num_experts
    by_layer = [np.ascontiguousarray(trace.experts[:, layer]) for layer in range(layers)]
    transition = np.zeros((layers - 1, experts, experts), np.int32)
    if transitions:
        for layer in range(layers - 1):
            _count_steps(by_layer[layer], by_layer[layer + 1], transition[layer])
    demand = count_load(trace, source, num_sources)
    return AffinityGraph(
        num_tokens=trace.num_tokens,
        load=demand.sum(axis=0),
        coactivation=np.stack([count_coactivation(chosen, experts) for chosen in by_layer]),
        transition=transition,
        demand=demand,
    )
