"""Prefetch on a GPU: layers of experts as in offload.py, with and without, by turns, in one run.

There is no model here, so that foresight is played: of the experts that the next layer will need, each is named with
the chance that the demo model's routers had (0.73, scripts/bench/prefetch.py), else another is. What a router costs
(its product, softmax and top-k) is paid. The gain is the mean of pairs of turns beside each other, with a
95% interval. Prints a table, writes JSON.

    python scripts/bench/prefetch_device.py --trace mixed-64e-12l.npz --out docs/measured/prefetch-gpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from placement.cache.policy import compile_policies
from placement.intervals import random_groups
from placement.trace import load_trace
from scripts.bench.offload import CPU_LINK, CUDA, DEVICE, DTYPE, Bench, raw_bandwidth
from workers.crossover import measure_crossover
from workers.cuda_edge import link_for
from workers.expert_compute import ExpertCompute
from workers.foresight import NextRouter
from workers.slot_cache import SlotCache

PRECISION = 0.73
STEPS = {1: 60, 8: 14, 32: 8} if CUDA else {1: 4}
# Pairs of turns: one without, one with.
PAIRS = 8 if CUDA else 3


class _Router(torch.nn.Module):
    def __init__(self, num_experts: int, hidden: int, top_k: int) -> None:
        super().__init__()
        self.weight = torch.randn((num_experts, hidden), dtype=DTYPE, device=DEVICE)
        self.top_k = top_k

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden, self.weight)
        scores, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float), self.top_k, dim=-1)
        return logits, scores, ids


def named(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """What a router would have said of ids [L, n, K]."""
    right = torch.rand(ids.shape, device=ids.device) < PRECISION
    return torch.where(right, ids, torch.randint_like(ids, num_experts))


def seconds_per_step(
    bench: Bench, cache: SlotCache, layers: list[ExpertCompute], router: NextRouter, steps: list[Any]
) -> float:
    batch, top_k = steps[0][0].shape[1:]
    hidden = torch.randn((batch, bench.module.hidden_dim), dtype=DTYPE, device=DEVICE)
    weights = torch.full((batch, top_k), 1 / top_k, dtype=DTYPE, device=DEVICE)
    _wait()
    begun = time.perf_counter()
    for ids, foreseen in steps:
        out = hidden
        for number, layer in enumerate(layers):
            ahead = None
            if number + 1 < len(layers) and cache.ahead.looks_ahead():
                router(out)
                ahead = foreseen[number + 1]
            out = out + layer(out, ids[number], weights, alone=True, ahead=ahead).to(out.dtype)
    _wait()
    return (time.perf_counter() - begun) / len(steps)


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def compare(bench: Bench, batch: int, share: float, link_bytes_per_s: float) -> None:
    trace = bench.trace
    cache = bench.cache(share, batch, link_bytes_per_s=link_bytes_per_s)
    layers: list[ExpertCompute] = [layer.func for layer in bench.computes(cache)]  # type: ignore[attr-defined]
    router = NextRouter(
        _Router(trace.num_experts, bench.module.hidden_dim, trace.top_k),
        num_experts=trace.num_experts,
        top_k=trace.top_k,
    )
    count = STEPS[batch]
    steps = [
        (ids.to(DEVICE), named(ids.to(DEVICE), trace.num_experts)) for ids in bench.steps(batch, 2 * count * PAIRS)
    ]
    found: dict[bool, list[float]] = {False: [], True: []}
    hits: dict[bool, list[float]] = {False: [], True: []}
    for cache.ahead.wanted in (True, False):  # What is loaded or compiled at its first use is loaded now.
        seconds_per_step(bench, cache, layers, router, steps[: count // 2])
    for turn in range(2 * PAIRS):
        # Without, with, with, without: what drifts weighs on both alike.
        cache.ahead.wanted = turn % 4 in (1, 2)
        before = (cache.counters.hits, cache.counters.lookups)
        found[cache.ahead.wanted].append(
            seconds_per_step(bench, cache, layers, router, steps[turn * count : (turn + 1) * count])
        )
        hits[cache.ahead.wanted].append((cache.counters.hits - before[0]) / (cache.counters.lookups - before[1]))
    off, on = statistics.median(found[False]), statistics.median(found[True])
    gains = np.log(np.array(found[False]) / np.array(found[True]))
    interval = random_groups(float(gains.mean()), gains) or (float("nan"), float("nan"))
    counters = cache.counters
    bench.note(
        "prefetch",
        batch=batch,
        share=share,
        off_ms=off * 1e3,
        on_ms=on * 1e3,
        speed=float(np.exp(gains.mean())),
        speed_from=float(np.exp(interval[0])),
        speed_to=float(np.exp(interval[1])),
        hits_off=statistics.median(hits[False]),
        hits_on=statistics.median(hits[True]),
        precision=counters.prefetch_used / max(1, counters.prefetched),
        prefetched=counters.prefetched,
        wasted_mb=counters.prefetch_wasted_bytes / 1e6,
    )
    cache.close()


def write(options: argparse.Namespace, bench: Bench) -> None:
    if options.out is None:
        return
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if CUDA else "CPU, software link",
        "commit": options.commit,
        "torch": torch.__version__,
        "forced": options.forced,
        "rows": bench.rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--forced", action="store_true", help="fetch ahead however busy the link is")
    parser.add_argument("--batches", help="of those that are measured, these alone, comma-separated")
    parser.add_argument("--commit", default="", help="for machines without git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = list(STEPS) if options.batches is None else [int(batch) for batch in options.batches.split(",")]
    bench = Bench(load_trace(options.trace))
    compile_policies()
    with torch.no_grad():
        link_bytes_per_s = raw_bandwidth(bench) if CUDA else CPU_LINK
        bench.note("raw pinned copy", gbs=link_bytes_per_s / 1e9)
        begun = time.perf_counter()
        crossover = measure_crossover(
            slab=bench.slab,
            layout=bench.layout,
            module=bench.module,
            link=link_for(DEVICE, bench.slab.memory),
            device=DEVICE,
            num_slots=384,
            num_experts=bench.trace.num_experts,
            hidden_size=bench.module.hidden_dim,
            dtype=DTYPE,
        )
        bench.note("crossover", stream_from=crossover, seconds=time.perf_counter() - begun)
        for batch in wanted:
            for share in (0.25, 0.5):
                compare(bench, batch, share, math.inf if options.forced else link_bytes_per_s)
                write(options, bench)


if __name__ == "__main__":
    main()
