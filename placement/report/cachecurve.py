"""Hit rates of an expert cache by its size: least recently used, beside the best that any cache could do.

Belady's rule drops what is needed last; it must know the future, so it is a bound and no policy. (L. A. Belady, A study
of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.cache.simulate import belady_hits, simulate
from placement.cache.stream import LookupStream
from placement.core import Placement
from placement.dispatch import choose_ranks
from placement.homes import homes_of
from placement.report.activation import evenly
from placement.topology import Topology
from placement.trace import RoutingTrace

STREAMS, MAX_STEPS, MAX_SIZES, MAX_ARENAS = 16, 1000, 12, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCurve:
    """slots [n]: GPU slots for the experts of one layer on one rank; lru, belady [n]: share of reads that hit.

    streams: requests served side by side in a step, None where the steps are the recorded ones. num_reads: reads of
    an expert that stand behind it; layers, ranks: how many of each were looked at.
    """

    slots: NDArray[np.int64]
    lru: NDArray[np.float64]
    belady: NDArray[np.float64]
    streams: int | None
    num_steps: int
    num_reads: int
    layers: int
    ranks: int


def cache_curve(placement: Placement, topology: Topology, trace: RoutingTrace) -> CacheCurve:
    """Each layer has slots of its own on each rank, as the workers do; some layers and ranks, evenly spread.

    Steps are the recorded ones. Where there are none, 16 streams of whole requests are read side by side, one token
    each a step, as a server under constant load does.
    """
    step, streams = _steps(trace)
    kept = step < MAX_STEPS
    trace, step = trace.select(kept), step[kept]
    homes = homes_of(trace, topology.num_ranks)
    holds = placement.weights_per_rank()
    layers = evenly(trace.num_layers, 6)
    ranks = evenly(topology.num_ranks, max(1, MAX_ARENAS // len(layers)))
    slots = np.array([size + 1 for size in evenly(placement.rows_per_rank, MAX_SIZES)])
    hits, reads = np.zeros((2, len(slots)), np.int64), 0
    for layer in layers:
        served = choose_ranks(trace.experts[:, layer], homes, holds[layer], topology.node_of_rank())
        for rank in ranks:
            token, place = np.nonzero(served == rank)
            # Each expert once a step, steps in order.
            words = np.unique(step[token] * trace.num_experts + trace.experts[token, layer, place])
            lookups = _lookups(words, trace.num_experts)
            hits[0] += [_lru_hits(lookups, size) for size in slots]
            hits[1] += [belady_hits(lookups, size) for size in slots]
            reads += len(words)
    share = hits / max(1, reads)
    return CacheCurve(
        slots=slots,
        lru=share[0],
        belady=share[1],
        streams=streams,
        num_steps=len(np.unique(step)),
        num_reads=reads,
        layers=len(layers),
        ranks=len(ranks),
    )


def _lookups(words: NDArray[np.int64], num_experts: int) -> LookupStream:
    """One arena's stream. words: step * num_experts + expert, ascending."""
    starts = np.flatnonzero(np.diff(words // num_experts)) + 1
    return LookupStream(
        num_layers=1,
        num_experts=num_experts,
        ids=(words % num_experts).astype(np.int32),
        offsets=np.concatenate([[0], starts, [len(words)]]).astype(np.int64),
    )


def _lru_hits(lookups: LookupStream, slots: int) -> int:
    policy = EvictionPolicy(PolicyName.LRU, num_layers=1, num_experts=lookups.num_experts, top_k=1, share=0.0)
    return simulate(lookups, policy, np.zeros(1, np.int64), np.array([slots]))


def _steps(trace: RoutingTrace) -> tuple[NDArray[np.int64], int | None]:
    """The step of each token, numbered from 0 without gaps, and the streams that were made up for it."""
    recorded, step = np.unique(trace.step, return_inverse=True)
    if len(recorded) > 1:
        return step.astype(np.int64), None
    _, request = np.unique(trace.request, return_inverse=True)
    stream = request % STREAMS
    order = np.lexsort((trace.position, request, stream))
    start = np.searchsorted(stream[order], np.arange(STREAMS))
    made = np.empty(trace.num_tokens, np.int64)
    made[order] = np.arange(trace.num_tokens) - start[stream[order]]
    return made, STREAMS
