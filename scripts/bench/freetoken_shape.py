"""Stage of `beside_freetoken.py`: one layer in the shape of FreeToken's own benchmark; ours alone without a rival."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from placement.trace import RoutingTrace
from scripts.bench.freetoken_sides import Ours, Rival, clocked, graph_of, num_wrong
from scripts.bench.offload import CPU_LINK, CUDA, DEVICE, Bench, raw_bandwidth
from scripts.bench.offload_shapes import SHAPES
from workers.cuda_edge import link_for
from workers.links import Link
from workers.slot_cache import SlotCache
from workers.thread_link import ThreadLink

BATCHES, MISS_RATES = (1, 4, 16, 32), (0.0, 0.25, 0.5, 1.0)
REPEATS, WARM_REPEATS = (9, 2) if CUDA else (2, 1)
# As many slots as the largest batch has ids: with fewer FreeToken's lookup asks the host.
LAYERS, SHARE = 4, 0.5
LAYERS_BEFORE = 3


def shape_bench(trace: RoutingTrace) -> Bench:
    return Bench(trace, replace(SHAPES["qwen3"], num_layers=LAYERS))


def slots_of_shape(bench: Bench) -> int:
    return round(SHARE * bench.trace.num_layers * bench.trace.num_experts)


def shape_cache(bench: Bench) -> SlotCache:
    """All that a layer misses lands in slots of its own, however much that is, as in FreeToken's cache."""
    trace = bench.trace
    link: Link = link_for(DEVICE, bench.slab.memory) if CUDA else ThreadLink(bytes_per_s=CPU_LINK)
    policy = EvictionPolicy(
        PolicyName.REUSE,
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        share=SHARE,
    )
    return SlotCache(
        slab=bench.slab,
        policy=policy,
        link=link,
        num_slots=slots_of_shape(bench),
        blob_bytes=bench.layout.num_bytes,
        device=DEVICE,
        stream_from=trace.num_experts + 1,
        prefetch_share=0.0,
    )


def stage_shape(bench: Bench, rival: Rival | None) -> None:
    """Layer 0 needs the first experts, of which the first lie in slots already; experts of other layers fill the rest.
    In the last case all of a layer's experts are missing: what lies in slots then came by the copies timed."""
    raw = raw_bandwidth(bench) if CUDA else CPU_LINK
    bench.note("raw pinned copy", gbs=raw / 1e9)
    trace, ours = bench.trace, Ours(shape_cache(bench))
    others = [ExpertId(layer, e) for layer in range(1, trace.num_layers) for e in range(trace.num_experts)]
    for batch in BATCHES:
        needed = min(trace.num_experts, batch * trace.top_k)
        ids = (torch.arange(batch * trace.top_k, device=DEVICE) % needed).view(batch, trace.top_k)
        again = None if rival is None else graph_of(rival, partial(rival.layer, 0), ids)
        for rate in MISS_RATES:
            cached = needed - round(needed * rate)
            items = [*(ExpertId(0, expert) for expert in range(cached)), *others][: ours.cache.num_slots]
            figures = {"moetis_ms": median_ms(ours, items, partial(ours.layer, 0), ids)}
            if rival is not None:
                figures["freetoken_ms"] = median_ms(rival, cached, partial(rival.layer, 0), ids.int())
                if again is not None:
                    figures["freetoken_graph_ms"] = median_ms(rival, cached, again, ids)
            bound = (needed - cached) * bench.layout.num_bytes / raw
            bench.note(
                "its shape", batch=batch, needed=needed, missing=needed - cached, **figures, bound_ms=bound * 1e3
            )
    sides = {"moetis": (bench.layout.views(ours.cache.slots), ours.where())}
    if rival is not None:
        sides["freetoken"] = (rival.views(), rival.where())
    for side, (views, where) in sides.items():
        here = {item: slot for item, slot in where.items() if item[0] == 0}
        bench.note("its shape, bytes in slots", side=side, experts=len(here), wrong=num_wrong(bench, views, here))
    ours.cache.close()


def median_ms(side: Ours | Rival, has: Any, run: Callable[[torch.Tensor], Any], ids: torch.Tensor) -> float:
    """run gets ids of its own each time, since FreeToken writes slots over them. Layers that miss nothing come before,
    as in a running model: else the host's caches hold what filled the slots."""
    times = []
    for _ in range(REPEATS + WARM_REPEATS):
        side.has(has)
        for _ in range(LAYERS_BEFORE):
            side.miss_nothing()
        times += clocked(run, [ids.clone()])[0]
    return statistics.median(times[WARM_REPEATS:]) * 1e3
