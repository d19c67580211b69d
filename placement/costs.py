"""The cost model: how long a step's MoE layers take, alpha-beta, from counts that a replay gives.

Per layer: compute is the slowest rank's (experts it must read, tokens it must multiply); dispatch, and combine again,
is at each level of the tree the latency and the bytes of the busiest link, sends and receives each. A token's vector
crosses between nodes once per node and inside a node once per rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.dispatch import holders_of, serve_token
from placement.evaluate import check_fit, steps_across_requests
from placement.topology import Topology
from placement.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the model makes a rank read, compute and send.

    token_bytes: one hidden state as dispatched; expert_bytes: one expert's weights; pair_flops: one token through one
    expert; combine_bytes: one sum on its way home (0: as many as dispatched). The defaults are DeepSeek-V3's: hidden
    7168 in bfloat16, experts 3 x 7168 x 2048 in 8 bits.
    """

    token_bytes: float = 14_336.0
    expert_bytes: float = 44.0e6
    pair_flops: float = 88.1e6
    combine_bytes: float = 0.0

    @property
    def home_bytes(self) -> float:
        """One vector's bytes on the way home."""
        return self.combine_bytes or self.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds that the MoE layers of one step take, summed over layers: mean and 99th percentile over steps.

    compute_s and exchange_s are the means of the two parts; tokens_per_step: the batch; num_steps: what stands behind.
    """

    mean_s: float
    p99_s: float
    compute_s: float
    exchange_s: float
    tokens_per_step: int
    num_steps: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@nb.njit(cache=True, nogil=True)
def count_step(
    chosen: Any,
    home: Any,
    holds: Any,
    table: Any,
    count: Any,
    groups: Any,
    node_level: Any,
    scratch: Any,
    sent: Any,
    got: Any,
    seen: Any,
) -> Any:
    """One step of one layer: fills sent, got [levels, R] vectors per group, and seen [R, E] (False before), the experts
    that each rank reads; returns pairs [R] and their number [R]."""
    mark, needs, served, stamp = scratch
    num_levels, num_ranks = groups.shape
    node_of_rank = groups[node_level]
    pairs, read = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    to_rank = np.full(num_ranks, -1, np.int64)
    to_node = np.full(num_ranks, -1, np.int64)
    for token in range(len(chosen)):
        source = home[token]
        stamp[0] += 1
        serve_token(chosen[token], source, holds, table, count, node_of_rank, mark, stamp[0], needs, served)
        for k in range(len(served)):
            rank = served[k]
            pairs[rank] += 1
            if not seen[rank, chosen[token, k]]:
                seen[rank, chosen[token, k]] = True
                read[rank] += 1
            if rank == source or to_rank[rank] == token:
                continue
            to_rank[rank] = token
            node = node_of_rank[rank]
            if node == node_of_rank[source] or to_node[node] == token:
                for level in range(node_level + 1, num_levels):
                    got[level, groups[level, rank]] += 1
                    sent[level, groups[level, source if node == node_of_rank[source] else rank]] += 1
                continue
            to_node[node] = token
            for level in range(node_level + 1):
                if groups[level, source] != groups[level, rank]:
                    sent[level, groups[level, source]] += 1
                    got[level, groups[level, rank]] += 1
    return pairs, read


@nb.njit(cache=True, nogil=True)
def _time_layer(
    chosen: Any, home: Any, holds: Any, groups: Any, node_level: Any, bounds: Any, rates: Any, links: Any, out: Any
) -> None:
    """out [steps, 2]: seconds of compute and of exchange. rates: seconds per expert read, per pair, bytes of a vector
    there and back."""
    table, count = holders_of(holds)
    num_levels, num_ranks = groups.shape
    mark = np.full(2 * num_ranks, -1, np.int64)
    scratch = (mark, np.zeros(chosen.shape[1], np.bool_), np.empty(chosen.shape[1], np.int32), np.zeros(1, np.int64))
    for step in range(len(bounds) - 1):
        sent, got = np.zeros((num_levels, num_ranks), np.int64), np.zeros((num_levels, num_ranks), np.int64)
        tokens = slice(bounds[step], bounds[step + 1])
        seen = np.zeros((num_ranks, len(count)), np.bool_)
        pairs, read = count_step(
            chosen[tokens], home[tokens], holds, table, count, groups, node_level, scratch, sent, got, seen
        )
        out[step, 0] = (read * rates[0] + pairs * rates[1]).max()
        exchange = 0.0
        for level in range(num_levels):
            busiest = max(sent[level].max(), got[level].max())
            if busiest:
                exchange += 2 * links[level, 1] + busiest * rates[2] / links[level, 0]
        out[step, 1] = exchange


def step_times(
    placement: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    sizes: ModelSizes,
    tokens_per_step: int,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Seconds [steps, L, 2] of compute and exchange; steps are drawn across requests. Raises as `check_fit`.

    homes [T]. Give prefill and decode tokens apart, each with its own batch.
    """
    check_fit(placement, topology, trace)
    step = steps_across_requests(trace.num_tokens, tokens_per_step, seed)
    order = np.argsort(step, kind="stable")
    bounds = np.r_[0, np.cumsum(np.bincount(step))].astype(np.int64)
    device = topology.device
    rates = np.array(
        [
            sizes.expert_bytes / device.hbm_bandwidth,
            sizes.pair_flops / device.peak_flops,
            sizes.token_bytes + sizes.home_bytes,
        ]
    )
    links = np.array([[link.bandwidth, link.latency_s] for link in topology.links])
    home = np.ascontiguousarray(homes[order], np.int32)
    holds = placement.weights_per_rank()
    times = np.zeros((trace.num_layers, len(bounds) - 1, 2))
    for layer in range(trace.num_layers):
        chosen = np.ascontiguousarray(trace.experts[order, layer], np.int32)
        _time_layer(
            chosen, home, holds[layer], topology.groups, topology.node_level, bounds, rates, links, times[layer]
        )
    return times.transpose(1, 0, 2)


def step_time(
    placement: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    sizes: ModelSizes,
    tokens_per_step: int,
    *,
    overlap: bool = False,
    seed: int = 0,
) -> StepTime:
    """Modelled step time: compute plus exchange, or the larger of the two where batches overlap. As `step_times`."""
    times = step_times(placement, topology, trace, homes, sizes, tokens_per_step, seed)
    per_layer = times.max(axis=2) if overlap else times.sum(axis=2)
    per_step = per_layer.sum(axis=1)
    parts = times.sum(axis=1).mean(axis=0)
    return StepTime(
        mean_s=float(per_step.mean()),
        p99_s=float(np.percentile(per_step, 99)),
        compute_s=float(parts[0]),
        exchange_s=float(parts[1]),
        tokens_per_step=min(tokens_per_step, trace.num_tokens),
        num_steps=len(per_step),
    )
