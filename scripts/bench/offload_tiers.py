"""Stages of `offload.py`: host memory for half of the experts and a disk for the others, shared rows, a soak."""

from __future__ import annotations

import copy
import functools
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from placement.core import ExpertId
from scripts.bench.offload import CUDA, DEVICE, DTYPE, STEPS, Bench, raw_bandwidth, run_step, timed_steps
from workers.cuda_edge import link_for
from workers.disk_tier import BlobFile, DiskTier
from workers.expert_compute import ExpertCompute
from workers.host_slab import checksum
from workers.shared_slab import SharedSlab
from workers.slot_cache import SlotCache
from workers.tiered_slab import LEAST_ROWS, TieredSlab

MEMORY_SHARE = 0.5
# As the resident model computes it, but for the order of sums: a wrong expert would differ by about 1.
ERROR_LIMIT = 0.02
SOAK_BATCHES = (1, 1, 1, 2, 5, 8, 32, 200)
SHARED_ROWS = 64


def stage_tiers(bench: Bench) -> None:
    """A quarter of the experts in slots, half in host memory, half on disk; and an expert that changes its owner."""
    with tempfile.TemporaryDirectory() as folder:
        other = copy.copy(bench)
        other.slab = _half_on_disk(bench, Path(folder))
        for batch in [size for size in STEPS if size <= 32]:
            count = 20 if CUDA else 3
            steps = bench.steps(batch, count + 5)
            _, expected = timed_steps(bench.resident, steps, bench.module.hidden_dim)
            cache = other.cache(0.25, batch)
            layers = other.computes(cache)
            timed_steps(layers, steps[:5], bench.module.hidden_dim)
            before = other.slab.figures()
            hits, lookups = cache.counters.hits, cache.counters.lookups
            seconds, out = timed_steps(layers, steps[5:], bench.module.hidden_dim)
            after = other.slab.figures()
            bench.note(
                "half on disk",
                batch=batch,
                ms=statistics.mean(seconds) * 1e3,
                hit_rate=(cache.counters.hits - hits) / (cache.counters.lookups - lookups),
                disk_reads_a_step=(after["disk_reads"] - before["disk_reads"]) / count,
                disk_stall_ms=(after["disk_stall_s"] - before["disk_stall_s"]) / count * 1e3,
                disk_failures=after["disk_failures"],
                error=float((out - expected).float().norm() / expected.float().norm()),
            )
            cache.close()
    _shared(bench)


def _half_on_disk(bench: Bench, folder: Path) -> TieredSlab:
    """The bench's experts, the first half of each layer's in memory."""
    size, owned = bench.layout.num_bytes, sorted(bench.slab.experts(), key=lambda item: (item.expert, item.layer))
    rows = max(LEAST_ROWS, round(MEMORY_SHARE * len(owned)))
    file = BlobFile(folder, size)
    slab = TieredSlab(rows=rows, capacity=len(owned), blob_bytes=size, disk=DiskTier(source=None, file=file), pin=CUDA)
    for expert in owned[:rows]:
        slab.add(expert, bench.slab.blob(expert))
    for expert in owned[rows:]:
        file.write(expert, bench.slab.blob(expert))
        slab.add_away(expert)
    return slab


def _shared(bench: Bench) -> None:
    """Copies from a slab that other ranks can map, and an expert that is adopted instead of copied where it can be."""
    size = bench.layout.num_bytes
    here, there = (SharedSlab(capacity=SHARED_ROWS, blob_bytes=size, pin=CUDA) for _ in range(2))
    items = [ExpertId(0, expert) for expert in range(min(SHARED_ROWS, bench.trace.num_experts))]
    for item in items:
        here.add(item, bench.slab.blob(item))
    target = torch.empty((len(items), size), dtype=torch.uint8, device=DEVICE)
    link, rates = link_for(DEVICE, here.memory), []
    for _ in range(5):
        begun = time.perf_counter()
        pairs = [(row, here.blob(item)) for row, item in zip(target, items, strict=True)]
        link.copy(pairs, after=None, urgent=True).finish()
        rates.append(target.numel() / (time.perf_counter() - begun))
    digest = checksum(here.blob(items[0]))
    begun = time.perf_counter()
    adopted = there.adopt(items[0], here.offer(items[0]), digest)
    seconds = time.perf_counter() - begun
    row = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    # Where memory is pinned nothing is adopted: the receiver copies the row.
    owner = there if adopted else here
    link.copy([(row, owner.blob(items[0]))], after=None, urgent=True).finish()
    raw = raw_bandwidth(bench)
    rate = statistics.median(rates)
    bench.note(
        "shared slab",
        gbs=rate / 1e9,
        of_raw=rate / raw,
        adopted=adopted,
        adopt_ms=seconds * 1e3,
        same_on_the_device=torch.equal(row.cpu(), bench.slab.blob(items[0])),
    )
    link.close()


def stage_soak(bench: Bench, seconds: float) -> None:
    """Random batches, prefetches, resizes and forced evictions; outputs beside a cache that holds everything."""
    rng = np.random.default_rng(5)
    cache, whole = bench.cache(0.2, 1, learn=False, link_bytes_per_s=math.inf), bench.cache(1.0, 1, learn=False)
    whole.warm_up(sorted(bench.slab.experts()))
    layers, resident = [_computes(bench, one) for one in (cache, whole)]
    worst, wrong, runs, evicted, begun = 0.0, 0, 0, 0, time.monotonic()
    memory: list[int] = []
    while time.monotonic() - begun < seconds:
        batch = int(rng.choice(SOAK_BATCHES))
        ids = bench.steps(batch, 1)[0][:, rng.permutation(batch)].to(DEVICE)
        hidden = torch.randn((batch, bench.module.hidden_dim), dtype=DTYPE, device=DEVICE)
        weights = torch.full(ids.shape[1:], 1 / ids.shape[2], dtype=DTYPE, device=DEVICE)
        ahead = torch.where(torch.rand(ids.shape, device=DEVICE) < 0.7, ids, torch.zeros_like(ids))
        guessing = [
            functools.partial(layer, ahead=ahead[number + 1] if number + 1 < len(layers) else None)
            for number, layer in enumerate(layers)
        ]
        expected = run_step(resident, hidden, ids, weights)
        found = run_step(guessing if cache.ahead.looks_ahead() else layers, hidden, ids, weights)
        error = float((found - expected).float().norm() / expected.float().norm())
        worst, wrong = max(worst, error), wrong + (error > ERROR_LIMIT)
        if rng.random() < 0.05:
            cache.resize(max(1, int(rng.integers(1, 40) / 100 * bench.trace.num_layers * bench.trace.num_experts)))
        if rng.random() < 0.3:
            for _ in range(int(rng.integers(1, 10))):
                layer, expert = rng.integers(bench.trace.num_layers), rng.integers(bench.trace.num_experts)
                cache.forget(ExpertId(int(layer), int(expert)))
                evicted += 1
        runs += 1
        memory.append(torch.cuda.memory_allocated() - cache.num_bytes if CUDA else 0)
    counters = cache.counters
    bench.note(
        "soak",
        seconds=seconds,
        steps=runs,
        worst_error=worst,
        wrong_steps=wrong,
        growth_mb=(memory[-1] - memory[len(memory) // 5]) / 1e6,
        resizes=counters.resizes,
        forced_evictions=evicted,
        copies=counters.copies,
        prefetched=counters.prefetched,
        prefetch_used=counters.prefetch_used,
        streamed_layers=counters.streamed_layers,
    )
    cache.close()
    whole.close()


def _computes(bench: Bench, cache: SlotCache) -> list[ExpertCompute]:
    return [
        ExpertCompute(layer=layer, module=bench.module, layout=bench.layout, cache=cache, partial_dtype=torch.float32)
        for layer in range(bench.trace.num_layers)
    ]
