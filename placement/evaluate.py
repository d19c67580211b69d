"""Score a placement by replaying a trace through the replica choice that the workers use."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.dispatch import holders_of, serve_token
from placement.errors import PlacementError, TopologyError, TraceError
from placement.topology import Topology
from placement.trace import RoutingTrace

TOKENS_PER_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a placement does to a trace. Visits are per token and layer, loads are (token, expert) pairs served.

    nodes_visited, ranks_visited: other nodes than home's, other ranks than home.
    load_max_over_mean: of ranks over the whole trace, averaged over layers; node_... of nodes;
    step_... of ranks in steps of 256 tokens drawn across requests, averaged over steps and layers.
    """

    nodes_visited: float
    ranks_visited: float
    load_max_over_mean: float
    node_load_max_over_mean: float
    step_load_max_over_mean: float
    num_tokens: int
    num_requests: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Counts of one replay, before averaging: nodes, ranks [T] int32 summed over layers; load [steps, L, R]."""

    nodes: NDArray[np.int32]
    ranks: NDArray[np.int32]
    load: NDArray[np.int32]


@nb.njit(cache=True, nogil=True)
def _replay_layer(
    experts: Any, home: Any, holds: Any, node_of_rank: Any, step: Any, nodes: Any, ranks: Any, load: Any
) -> None:
    table, count = holders_of(holds)
    num_tokens, top_k = experts.shape
    num_ranks = len(node_of_rank)
    mark = np.full(num_ranks + node_of_rank.max() + 1, -1, np.int64)
    seen = mark.copy()
    needs = np.zeros(top_k, np.bool_)
    served = np.empty(top_k, np.int32)
    for token in range(num_tokens):
        serve_token(experts[token], home[token], holds, table, count, node_of_rank, mark, token, needs, served)
        seen[home[token]] = token
        seen[num_ranks + node_of_rank[home[token]]] = token
        for rank in served:
            load[step[token], rank] += 1
            if seen[rank] != token:
                seen[rank] = token
                ranks[token] += 1
            node = num_ranks + node_of_rank[rank]
            if seen[node] != token:
                seen[node] = token
                nodes[token] += 1


def check_fit(placement: Placement, topology: Topology, trace: RoutingTrace) -> None:
    """Raises TopologyError or TraceError where the three are not of one model and one cluster."""
    if placement.num_ranks != topology.num_ranks:
        raise TopologyError(
            f"topology '{topology.name}' has {topology.num_ranks} ranks, the placement {placement.num_ranks}"
        )
    if (placement.num_layers, placement.num_experts) != (trace.num_layers, trace.num_experts):
        raise TraceError(
            f"the trace is of another model: it has {trace.num_layers} layers x {trace.num_experts} experts, "
            f"the placement {placement.num_layers} x {placement.num_experts}"
        )


def _check_homes(homes: NDArray[np.int32], trace: RoutingTrace, num_ranks: int) -> None:
    if homes.shape != (trace.num_tokens,):
        raise TraceError(f"homes must be one rank for each of {trace.num_tokens} tokens, got {homes.shape}")
    if homes.min() < 0 or homes.max() >= num_ranks:
        wrong = homes.min() if homes.min() < 0 else homes.max()
        raise PlacementError(f"a token's home is rank {wrong}; ranks go from 0 to {num_ranks - 1}")


def steps_across_requests(num_tokens: int, tokens_per_step: int, seed: int = 0) -> NDArray[np.int32]:
    """The step of each token [T]: steps of equal size drawn at random over all tokens; the last may be larger."""
    num_steps = max(1, num_tokens // tokens_per_step)
    order = np.random.default_rng(seed).permutation(num_tokens)
    steps: NDArray[np.int32] = np.minimum(order // tokens_per_step, num_steps - 1).astype(np.int32)
    return steps


def replay(
    placement: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    step: NDArray[np.int32] | None = None,
) -> Replay:
    """Serve every token of the trace. homes, step [T]; steps of 256 tokens across requests unless given.

    Raises as `check_fit`.
    """
    check_fit(placement, topology, trace)
    step = steps_across_requests(trace.num_tokens, TOKENS_PER_STEP) if step is None else step
    _check_homes(homes, trace, topology.num_ranks)
    holds = placement.weights_per_rank()
    nodes, ranks = np.zeros(trace.num_tokens, np.int32), np.zeros(trace.num_tokens, np.int32)
    load = np.zeros((trace.num_layers, int(step.max()) + 1, topology.num_ranks), np.int32)
    home = np.ascontiguousarray(homes, np.int32)
    for layer in range(trace.num_layers):
        chosen = np.ascontiguousarray(trace.experts[:, layer], np.int32)
        _replay_layer(chosen, home, holds[layer], topology.node_of_rank(), step, nodes, ranks, load[layer])
    return Replay(nodes=nodes, ranks=ranks, load=load.transpose(1, 0, 2))


def max_over_mean(load: NDArray[Any]) -> float:
    """Largest over mean along the last axis, averaged over the others; layers without load count as balanced."""
    mean = load.mean(axis=-1)
    ratio = np.where(mean > 0, load.max(axis=-1) / np.where(mean > 0, mean, 1), 1.0)
    return float(ratio.mean())


def evaluate(placement: Placement, topology: Topology, trace: RoutingTrace, homes: NDArray[np.int32]) -> Score:
    """Replay a trace. homes [T]: the rank on which each token's attention runs.

    Raises TraceError, TopologyError or PlacementError where the arguments do not fit each other.
    """
    return score_of(replay(placement, topology, trace, homes), topology, trace)


def score_of(counts: Replay, topology: Topology, trace: RoutingTrace) -> Score:
    """The averages of a replay of the trace."""
    per_token = 1 / (trace.num_tokens * trace.num_layers)
    total = counts.load.sum(axis=0)
    by_node = np.stack(
        [total[:, topology.node_of_rank() == node].sum(axis=1) for node in range(topology.num_nodes)], axis=1
    )
    ranks_per_node = np.bincount(topology.node_of_rank())
    return Score(
        nodes_visited=float(counts.nodes.sum() * per_token),
        ranks_visited=float(counts.ranks.sum() * per_token),
        load_max_over_mean=max_over_mean(total),
        node_load_max_over_mean=max_over_mean(by_node * (ranks_per_node.mean() / ranks_per_node)),
        step_load_max_over_mean=max_over_mean(counts.load),
        num_tokens=trace.num_tokens,
        num_requests=trace.num_requests,
    )
