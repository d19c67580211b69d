"""Stages of `offload.py`: where the time of small batches goes, the fused kernels, and quantised experts."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from placement.core import ExpertId
from placement.fit.precision import Precision
from scripts.bench.offload import CUDA, DEVICE, DTYPE, STEPS, WARM_STEPS, Bench, _sync, timed_steps
from workers.banks import make_banks
from workers.blob import layout_of
from workers.cuda_edge import link_for
from workers.few_tokens import fused_for
from workers.host_slab import HostSlab
from workers.slot_cache import SlotCache
from workers.staging import Staging

REPEATS = 200 if CUDA else 5
SMALL = {batch: count for batch, count in STEPS.items() if batch <= 8}


def host_us(action: Callable[[], Any]) -> float:
    """Microseconds that the host spends on one call, nothing waited for."""
    for _ in range(5):
        action()
    _sync()
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
        _sync()
    return statistics.median(times) * 1e6


def device_us(action: Callable[[], Any]) -> float:
    """Microseconds of the device for one call, many under way."""
    for _ in range(5):
        action()
    _sync()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        action()
    _sync()
    return (time.perf_counter() - begun) / REPEATS * 1e6


def graph_us(action: Callable[[], Any]) -> float:
    """Microseconds of the device for one call without the host: ten in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        action()
    _sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            action()
    return device_us(graph.replay) / 10


def stage_launches(bench: Bench) -> None:
    """What the host pays for the steps of a layer, and the fused kernels beside the grouped product."""
    tiny = torch.zeros(8, device=DEVICE)
    ids = torch.zeros((1, 8), dtype=torch.int64, device=DEVICE)
    bench.note("host: one small operation", us=host_us(lambda: tiny.add_(1)))
    bench.note("host: ids to the host", us=host_us(ids.cpu))
    link = link_for(DEVICE, bench.slab.memory)
    slots = torch.zeros((64, bench.layout.num_bytes), dtype=torch.uint8, device=DEVICE)
    pair = (slots[0], bench.slab.blob(ExpertId(0, 0)))
    bench.note("host: submit one copy", us=host_us(lambda: link.copy([pair], after=None, urgent=True)))
    bench.note("host: a torch copy", us=host_us(lambda: pair[0].copy_(pair[1], non_blocking=True)))
    if CUDA:
        staging, here = Staging(DEVICE), np.zeros(66, np.int64)
        bench.note("host: ids through pinned memory", us=host_us(lambda: staging.fetch(ids)))
        bench.note("host: a table to the device", us=host_us(lambda: staging.send(here)))
    bench.note("host: a fence", us=host_us(link.fence))
    for expert, row in enumerate(slots):
        row.copy_(bench.slab.blob(ExpertId(0, expert)))
    for precision in Precision:
        layout = layout_of(bench.module, bench.trace.num_experts, precision)
        quantised = torch.zeros((64, layout.num_bytes), dtype=torch.uint8, device=DEVICE)
        for source, target in zip(slots, quantised, strict=True):
            for field, plain in zip(layout.fields, bench.layout.fields, strict=True):
                field.write(plain.stored(source[None])[0], target)
        _kernels(bench, precision, layout, quantised)
    link.close()


def _kernels(bench: Bench, precision: Precision, layout: Any, slots: torch.Tensor) -> None:
    fused = fused_for(bench.module, layout, slots)
    bank = make_banks(bench.module, layout, slots)[0]
    for tokens in (1, 2, 4, 8, 16, 32):
        chosen = torch.stack([torch.randperm(64)[:8] for _ in range(tokens)]).to(DEVICE)
        hidden = torch.randn((tokens, bench.module.hidden_dim), dtype=DTYPE, device=DEVICE)
        weights = torch.full((tokens, 8), 1 / 8, dtype=DTYPE, device=DEVICE)
        figures: dict[str, float] = {}
        flat, here = chosen.reshape(-1), chosen.reshape(-1).cpu().numpy()
        rows = torch.arange(tokens, device=DEVICE).repeat_interleave(8)
        if layout.is_quantised or not CUDA:
            order = torch.argsort(flat)
            used, counts = np.unique(here, return_counts=True)
            grouped = functools.partial(bank.forward, hidden[rows][order], flat[order], used.tolist(), counts.tolist())
        else:
            grouped = functools.partial(bank.weighted, hidden, chosen, weights)
        figures["grouped_us"] = device_us(grouped)
        if fused is not None:
            run = functools.partial(fused, hidden, chosen, torch.arange(64, device=DEVICE), weights, torch.float32)
            figures |= {"fused_us": device_us(run), "fused_host_us": host_us(run), "fused_gpu_us": graph_us(run)}
            used = len(torch.unique(chosen)) * layout.num_bytes
            figures["gbs"] = used / figures["fused_gpu_us"] / 1e3
        bench.note("kernels", precision=precision.value, tokens=tokens, **figures)


def stage_small(bench: Bench) -> None:
    """A step of few tokens, the grouped product alone and with the fused kernels, on the same cache."""
    from scripts.bench.offload import CPU_LINK, raw_bandwidth

    raw = raw_bandwidth(bench) if CUDA else CPU_LINK
    bench.note("raw pinned copy", gbs=raw / 1e9)
    for batch, count in SMALL.items():
        steps = bench.steps(batch, count + WARM_STEPS)
        plain, expected = timed_steps(bench.resident, steps, bench.module.hidden_dim)
        compute = statistics.median(plain[WARM_STEPS:])
        for share in (0.25, 0.5, 1.0) if batch == 1 else (0.5, 1.0):
            for few_pairs in (0, 10**6):
                cache = bench.cache(share, batch)
                if share == 1.0:
                    cache.warm_up(sorted(bench.slab.experts()))
                figures = _cached(bench, cache, steps, count, expected, few_pairs)
                bound = max(compute, figures.pop("missed_bytes") / raw)
                way = "fused" if few_pairs else "grouped"
                bench.note("small", batch=batch, share=share, way=way, of_bound=bound / figures["ms"] * 1e3, **figures)
                cache.close()


def _cached(
    bench: Bench, cache: SlotCache, steps: list[torch.Tensor], count: int, expected: torch.Tensor, few_pairs: int | None
) -> dict[str, float]:
    """The mean step in ms after warming up, what it missed, and the last output beside the resident model's."""
    layers = bench.computes(cache, few_pairs=few_pairs)
    timed_steps(layers, steps[:WARM_STEPS], bench.module.hidden_dim)
    counters = cache.counters
    before = (counters.copied_bytes, counters.lookups, counters.hits)
    seconds, out = timed_steps(layers, steps[WARM_STEPS:], bench.module.hidden_dim)
    lookups = counters.lookups - before[1]
    return {
        "ms": statistics.mean(seconds) * 1e3,
        "hit_rate": (counters.hits - before[2]) / lookups if lookups else 1.0,
        "missed_bytes": (counters.copied_bytes - before[0]) / count,
        "error": float((out - expected).float().norm() / expected.float().norm()),
    }


def in_precision(bench: Bench, precision: Precision) -> Bench:
    """The same bench with its experts quantised; the resident model stays as it is."""
    other = copy.copy(bench)
    other.layout = layout_of(bench.module, bench.trace.num_experts, precision)
    other.slab = HostSlab(capacity=bench.slab.capacity, blob_bytes=other.layout.num_bytes, pin=CUDA)
    for layer, weights in enumerate(bench.resident):
        packed = torch.zeros((bench.trace.num_experts, other.layout.num_bytes), dtype=torch.uint8, device=DEVICE)
        for expert, blob in enumerate(packed):
            for field in other.layout.fields:
                field.write(weights.get_parameter(field.name)[expert], blob)
        for expert, blob in enumerate(packed.cpu()):
            other.slab.add(ExpertId(layer, expert), blob)
    return other


def stage_precision(bench: Bench) -> None:
    """Link time of an expert and of a step, slots of the same bytes, and the outputs' distance from those stored."""
    link = link_for(DEVICE, bench.slab.memory)
    link_s: dict[str, float] = {}
    for precision in Precision:
        other = bench if precision is Precision.STORED else in_precision(bench, precision)
        slots = torch.zeros((64, other.layout.num_bytes), dtype=torch.uint8, device=DEVICE)
        pairs = [(row, other.slab.blob(ExpertId(1, expert))) for expert, row in enumerate(slots)]
        times = []
        for _ in range(5):
            _sync()
            begun = time.perf_counter()
            arrivals = [link.copy(pairs[start : start + 4], after=None, urgent=True) for start in range(0, 64, 4)]
            for arrival in arrivals:
                arrival.finish()
            times.append((time.perf_counter() - begun) / 64)
        link_s[precision] = statistics.median(times)
        bench.note(
            "precision: link",
            precision=precision.value,
            blob_bytes=other.layout.num_bytes,
            us_an_expert=link_s[precision] * 1e6,
            of_stored=link_s[precision] / link_s[Precision.STORED],
        )
        for batch, count in STEPS.items():
            steps = bench.steps(batch, count + WARM_STEPS)
            _, expected = timed_steps(bench.resident, steps[-1:], bench.module.hidden_dim)
            # The bytes of a quarter of the experts as stored.
            cache = other.cache(min(1.0, 0.25 * bench.layout.num_bytes / other.layout.num_bytes), batch)
            figures = _cached(other, cache, steps, count, expected, None)
            figures["missed_mb"] = figures.pop("missed_bytes") / 1e6
            bench.note("precision: step", precision=precision.value, batch=batch, slots=cache.num_slots, **figures)
            cache.close()
    link.close()
