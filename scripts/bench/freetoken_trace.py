"""Stage of `beside_freetoken.py`: the routing of a trace through both caches, ours alone without a rival."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch

from scripts.bench.freetoken_sides import Ours, Rival, clocked, freetoken_cache, fused_over, graph_of, num_wrong
from scripts.bench.lookup import learned
from scripts.bench.offload import CPU_LINK, CUDA, DEVICE, DTYPE, Bench, raw_bandwidth, timed_steps

# Batch: steps that warm up, and that are measured.
STEPS = {1: (20, 40), 8: (10, 12), 32: (4, 8)}
SHARES = (0.25, 0.50)


def stage_trace(bench: Bench, banks: dict[str, list[torch.Tensor]] | None, end: float) -> None:
    """banks: of FreeToken's cache, None for ours alone. end: no case begins later, by time.monotonic."""
    raw = raw_bandwidth(bench) if CUDA else CPU_LINK
    bench.note("raw pinned copy", gbs=raw / 1e9)
    for batch, (warm, count) in STEPS.items():
        bench._learned[batch] = learned(bench.fit, batch)
        steps = [ids.to(DEVICE).contiguous() for ids in bench.steps(batch, warm + count)]
        _, expected = timed_steps(bench.resident, steps[-1:], bench.module.hidden_dim)
        for share in SHARES:
            if time.monotonic() > end:
                bench.note("no time left", batch=batch, share=share)
                continue
            case = {"batch": batch, "share": share}
            for policy in ("fresh", "learned"):
                figures = ours_on(bench, steps, warm, share, policy == "learned", expected)
                bound = figures.pop("missed_bytes") / count / raw * 1e3
                bench.note("moetis", **case, policy=policy, **figures, bound_ms=bound)
            if banks is not None:
                num_slots = round(share * bench.trace.num_layers * bench.trace.num_experts)
                rival = Rival(freetoken_cache(bench, banks, num_slots))
                figures = rival_on(bench, rival, steps, warm, expected)
                bound = figures.pop("missed_bytes") / count / raw * 1e3
                bench.note("freetoken", **case, policy="lru", **figures, bound_ms=bound)


def ours_on(
    bench: Bench, steps: list[torch.Tensor], warm: int, share: float, learn: bool, expected: torch.Tensor
) -> dict[str, Any]:
    """The steps after the warm ones: lookups and copies alone, then on another cache with the products behind them."""
    batch = steps[0].shape[1]
    ours = Ours(bench.cache(share, batch, learn=learn))
    clocked(ours.step, steps[:warm])
    counters = ours.cache.counters
    before = counters.lookups, counters.hits, counters.copied_bytes
    seconds, _ = clocked(ours.step, steps[warm:])
    found = {
        "hit_rate": (counters.hits - before[1]) / (counters.lookups - before[0]),
        "missed_bytes": counters.copied_bytes - before[2],
        **milliseconds(seconds),
        "wrong": num_wrong(bench, bench.layout.views(ours.cache.slots), ours.where()),
    }
    ours.cache.close()
    cache = bench.cache(share, batch, learn=learn)
    alone = bench.computes(cache, few_pairs=10**6)
    timed_steps(alone, steps[:warm], bench.module.hidden_dim)
    seconds, out = timed_steps(alone, steps[warm:], bench.module.hidden_dim)
    cache.close()
    return found | milliseconds(seconds, "computed_") | {"error": relative_error(out, expected)}


def rival_on(
    bench: Bench, rival: Rival, steps: list[torch.Tensor], warm: int, expected: torch.Tensor
) -> dict[str, Any]:
    """The same steps, from the same state each time: call by call (its counters on), as a graph, and with the products
    behind them, as a graph too where there can be one."""
    cache = rival.cache
    cache.collect_stats = True
    clocked(rival.step, [ids.int() for ids in steps[:warm]])
    begun, measured = rival.state(), steps[warm:]
    cache.lru_stats.zero_()
    seconds, _ = clocked(rival.step, [ids.int() for ids in measured])
    needed, missing = rival.counted()
    cache.collect_stats = False
    found: dict[str, Any] = {
        "hit_rate": 1 - missing / needed,
        "missed_bytes": missing * bench.layout.num_bytes,
        **milliseconds(seconds, "calls_"),
        "wrong": num_wrong(bench, rival.views(), rival.where()),
    }
    again = graph_of(rival, rival.step, steps[0])
    if again is not None:
        rival.restore(begun)
        found |= milliseconds(clocked(again, measured)[0])
        found["graph_wrong"] = num_wrong(bench, rival.views(), rival.where())
    if not CUDA:
        return found
    batch, top_k = steps[0].shape[1:]
    torch.manual_seed(1)  # As timed_steps has it.
    hidden = torch.randn((batch, bench.module.hidden_dim), dtype=DTYPE, device=DEVICE)
    weights = torch.full((batch, top_k), 1 / top_k, dtype=DTYPE, device=DEVICE)
    run = partial(rival.computed, fused_over(bench.layout, rival), hidden, weights)
    again = graph_of(rival, run, steps[0])
    rival.restore(begun)
    if again is None:
        clocked(run, [steps[0].int()])  # Compiles the kernels.
        rival.restore(begun)
    seconds, out = clocked(again or run, [ids.int() for ids in measured])
    found["computed_as"] = "calls" if again is None else "graph"
    return found | milliseconds(seconds, "computed_") | {"error": relative_error(out, expected)}


def milliseconds(seconds: list[float], which: str = "") -> dict[str, float]:
    return {f"{which}ms": statistics.mean(seconds) * 1e3, f"{which}median_ms": statistics.median(seconds) * 1e3}


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).float().norm() / expected.float().norm())
