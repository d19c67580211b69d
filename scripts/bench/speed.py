"""How long plans take: the large model's tables, and how the time grows with experts, ranks and tokens, as an SVG."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from math import log10
from typing import Any

import numpy as np

from placement.baselines import balance_placement, linear_placement
from placement.graph import build_graph, count_load
from placement.homes import homes_of
from placement.plan import plan_placement
from placement.relevel import relevel
from placement.replan import replan_within
from placement.topology import load_topology
from placement.trace import RoutingTrace

Row = dict[str, Any]
GROWTH_LAYERS = 8
EXPERTS = (16, 64, 256, 512)
RANKS = {4: "2x2", 16: "4x4", 64: "8x8", 144: "18x8"}
TOKENS = (5_000, 20_000, 100_000)
COLOURS = {"full plan": "#1f6f8b", "load only": "#c8553d"}


def synthetic_trace(num_tokens: int, layers: int, experts: int, top_k: int = 8, seed: int = 0) -> RoutingTrace:
    """Requests of 16 kinds with tastes and skewed popularity, for timing alone."""
    rng = np.random.default_rng(seed)
    request = np.sort(rng.integers(0, 400, num_tokens))
    kind = rng.integers(0, 16, 400)[request]
    chosen = np.empty((num_tokens, layers, top_k), np.uint16)
    for layer in range(layers):
        taste = rng.normal(0, 0.6, experts) + rng.normal(0, 1.0, (16, experts))
        for first in range(0, num_tokens, 20_000):
            part = slice(first, first + 20_000)
            noise = rng.gumbel(size=(len(kind[part]), experts)) * 0.8
            chosen[part, layer] = np.argpartition(-(noise + taste[kind[part]]), top_k, axis=1)[:, :top_k]
    return RoutingTrace(
        num_experts=experts,
        experts=chosen,
        request=request.astype(np.int64),
        position=np.arange(num_tokens, dtype=np.int32),
        step=np.zeros(num_tokens, np.int64),
        source_rank=np.full(num_tokens, -1, np.int32),
        phase=np.zeros(num_tokens, np.uint8),
    )


def timed(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    work()
    return clock() - begun


def speed() -> list[Row]:
    """Seconds and memory for 58 x 256 and for its parts; compiled code is loaded on a small trace first."""
    trace = synthetic_trace(100_000, 58, 256)
    small = replace(trace.select(np.arange(trace.num_tokens) < 500), experts=trace.experts[:500, :2].copy())
    load = count_load(trace)[0]
    build_graph(small)
    balance_placement(load[:1], 32, 9)
    seconds = timed(lambda: build_graph(trace, transitions=False))
    found: dict[str, float] = {
        "graph, million choices a second": trace.experts.size / seconds / 1e6,
        "graph with transitions, s": timed(lambda: build_graph(trace)),
        "load-only plan 288 slots on 32, ms": 1e3 * timed(lambda: balance_placement(load, 32, 9)),
    }
    for spec, rows in (("4x8", 9), ("18x8", 2), ("144x8", 1)):
        topology = load_topology(spec)
        plan_placement(small, topology, rows_per_rank=rows, effort=0.001)
        begun = time.process_time()
        found[f"full plan {spec}, s"] = timed(
            lambda topology=topology, rows=rows: plan_placement(trace, topology, rows_per_rank=rows)
        )
        found[f"full plan {spec}, CPU s"] = time.process_time() - begun
        found[f"peak RSS after {spec}, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found |= from_a_present_placement(trace, small, load)
    return [{"what": what, "value": value} for what, value in found.items()]


def from_a_present_placement(trace: RoutingTrace, small: RoutingTrace, load: Any) -> dict[str, float]:
    """Seconds of the fast loop and of re-plans within a budget, from experts in id order on 4 x 8."""
    topology, current = load_topology("4x8"), linear_placement(trace.num_layers, trace.num_experts, 32, 9)
    first = linear_placement(small.num_layers, trace.num_experts, 32, 9)
    replan_within(first, topology, small, homes_of(small, 32), most_copies=5)
    relevel(current, load, most_copies=1)
    homes = homes_of(trace, 32)
    found = {"relevel within 800 copies, s": timed(lambda: relevel(current, load, most_copies=800))}
    for budget in (100, 800):
        found[f"re-plan within {budget} copies, s"] = timed(
            lambda budget=budget: replan_within(current, topology, trace, homes, most_copies=budget)
        )
    return found


def growth() -> list[Row]:
    """CPU seconds of a full plan and of a load-only one, 8 layers, top-8, 1.25 slots an expert or the next whole rows.

    One of experts, ranks and tokens varies, the others stay at 128 experts, 4 nodes x 4 GPUs and 20,000 tokens.
    Compiled code is warmed up first.
    """
    cases = [("experts", experts, experts, 16, 20_000) for experts in EXPERTS]
    cases += [("ranks", ranks, 128, ranks, 20_000) for ranks in RANKS]
    cases += [("tokens", tokens, 128, 16, tokens) for tokens in TOKENS]
    small = synthetic_trace(1_000, 1, 16)
    plan_placement(small, load_topology("2x2"), rows_per_rank=5)
    balance_placement(count_load(small)[0], 4, 5)
    rows_out: list[Row] = []
    for against, value, experts, ranks, tokens in cases:
        trace = synthetic_trace(tokens, GROWTH_LAYERS, experts)
        topology = load_topology(RANKS[ranks])
        rows = -(-experts * 5 // (4 * ranks))
        load = count_load(trace)[0]
        rows_out.append(
            {
                "against": against,
                "value": value,
                "full plan": timed(
                    lambda trace=trace, topology=topology, rows=rows: plan_placement(
                        trace, topology, rows_per_rank=rows
                    ),
                    time.process_time,
                ),
                "load only": timed(
                    lambda load=load, ranks=ranks, rows=rows: balance_placement(load, ranks, rows), time.process_time
                ),
            }
        )
    return rows_out


def growth_svg(rows: list[Row], caption: str) -> str:
    """Three log-log panels of CPU seconds; both axes of decades."""
    panels = ("experts", "ranks", "tokens")
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 330" font-family="sans-serif" font-size="12">',
        '<rect width="960" height="330" fill="white"/>',
        *(
            _panel(name, [row for row in rows if row["against"] == name], 50 + 310 * at)
            for at, name in enumerate(panels)
        ),
        f'<text x="50" y="322" fill="#555">{caption}</text>',
    ]
    for at, (label, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{50 + 90 * at}" y="18" fill="{colour}" font-weight="bold">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, rows: list[Row], left: float) -> str:
    """One panel, 250 x 240, from 1 ms to 100 s."""
    values = [row["value"] for row in rows]
    low, high = log10(min(values)), log10(max(values))
    across = [left + 250 * (log10(value) - low) / (high - low) for value in values]

    def up(seconds: float) -> float:
        return 270 - 240 * (log10(max(seconds, 1e-3)) + 3) / 5

    parts = [f'<text x="{left + 125}" y="304" text-anchor="middle">{name}</text>']
    for decade in range(-3, 3):
        y = up(10.0**decade)
        parts.append(f'<path d="M{left} {y:.1f}h250" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g} s</text>')
    for x, value in zip(across, values, strict=True):
        parts.append(
            f'<text x="{x:.1f}" y="286" text-anchor="middle">{f"{value // 1000}k" if value > 999 else value}</text>'
        )
    for label, colour in COLOURS.items():
        points = [(x, up(row[label])) for x, row in zip(across, rows, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return "\n".join(parts)
