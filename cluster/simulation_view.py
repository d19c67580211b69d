"""Tables and a chart page of `moetis simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escape_html
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.simulation import Simulated, SimulatedModel
from placement.points import Point
from placement.windows import DriftPoint

LEFT = ("phase", "planner", "policy", "topology")
COLUMNS = (
    *("", "phase", "x experts", "planner", "tokens/GPU", "NIC GB/s", "on GPU", "GB/GPU", "nodes", "KB/token"),
    *("load", "load p99", "hits", "ms", "computing", "misses", "exchange", "tokens/s"),
)
COLOURS = ("#2f7ed8", "#12a187", "#e08a00", "#9a9a9a", "#9b59b6", "#c0392b", "#16a085")


def points_table(found: Simulated) -> Table:
    first = found.points[0]
    spread = f" in {first.num_groups} groups of {first.group_gpus}" if first.num_groups > 1 else ""
    title = f"{found.model} on {found.topology}: {first.num_gpus:,} GPUs{spread}"
    table = Table(title=escape(title), title_justify="left", caption_justify="left")
    table.caption = "* no other point of its phase, batch and links has fewer slots, less traffic and a more level load"
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in LEFT else "right")
    for point in found.points:
        table.add_row(*_cells(point))
    return table


def _cells(point: Point) -> list[str]:
    return [
        "*" if point.pareto else "",
        point.phase,
        f"{point.times_experts:.2f}",
        point.planner,
        str(point.tokens_per_gpu),
        f"{point.nic_gb_s:g}",
        f"{point.gpu_share:.0%}",
        f"{point.expert_gb:.1f}",
        f"{point.nodes_visited:.2f}",
        f"{point.node_kb_per_token:.0f}",
        f"{point.step_imbalance:.3f}",
        f"{point.step_imbalance_p99:.3f}",
        f"{point.hit_rate:.0%}",
        f"{1e3 * point.mean_s:.2f}",
        f"{1e3 * point.compute_s:.2f}",
        f"{1e3 * point.miss_s:.2f}",
        f"{1e3 * (point.dispatch_s + point.combine_s):.2f}",
        f"{point.tokens_per_s:,.0f}",
    ]


def memory_rows(found: Simulated) -> list[dict[str, Any]]:
    """How much memory buys how much: each planner's points by memory, against its first of the same case."""
    rows = []
    first: dict[tuple[Any, ...], Point] = {}
    for point in sorted(found.points, key=lambda point: (_case(point), point.expert_gb)):
        case = _case(point)
        base = first.setdefault(case, point)
        traffic = point.node_kb_per_token / base.node_kb_per_token if base.node_kb_per_token else None
        rows.append(
            {
                "phase": point.phase,
                "planner": point.planner,
                "tokens_per_gpu": point.tokens_per_gpu,
                "nic_gb_s": point.nic_gb_s,
                "expert_gb": point.expert_gb,
                "more_gb": point.expert_gb - base.expert_gb,
                "traffic_over_first": traffic,
                "step_over_first": point.mean_s / base.mean_s,
                "hit_rate": point.hit_rate,
            }
        )
    return rows


def _case(point: Point) -> tuple[str, str, int, float]:
    return point.phase, point.planner, point.tokens_per_gpu, point.nic_gb_s


def memory_table(found: Simulated) -> Table:
    table = Table(title="how much memory buys how much, against the least of each case", title_justify="left")
    for name in ("phase", "planner", "tokens/GPU", "NIC GB/s", "GB/GPU", "more GB", "traffic", "step time", "hits"):
        table.add_column(name, justify="left" if name in LEFT else "right")
    for row in memory_rows(found):
        traffic = row["traffic_over_first"]
        table.add_row(
            row["phase"],
            row["planner"],
            str(row["tokens_per_gpu"]),
            f"{row['nic_gb_s']:g}",
            f"{row['expert_gb']:.1f}",
            f"+{row['more_gb']:.1f}",
            "none" if traffic is None else f"{traffic:.2f}",
            f"{row['step_over_first']:.2f}",
            f"{row['hit_rate']:.0%}",
        )
    return table


def shared_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="all models on one cluster, taking turns", title_justify="left")
    for name in ("topology", "phase", "planner", "tokens/GPU", "NIC GB/s", "slots", "GB/GPU", "KB/token", "tokens/s"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            escape(row["topology"]),
            row["phase"],
            row["planner"],
            str(row["tokens_per_gpu"]),
            f"{row['nic_gb_s']:g}",
            " + ".join(str(slots) for slots in row["slots"]),
            f"{row['expert_gb']:.1f}",
            f"{row['node_kb_per_token']:.0f}",
            f"{row['tokens_per_s']:,.0f}",
        )
    return table


def drift_summary(points: Sequence[DriftPoint]) -> list[dict[str, Any]]:
    """The means of each policy over its windows, and what it moved in all."""
    rows = []
    for policy in dict.fromkeys(point.policy for point in points):
        own = [point for point in points if point.policy == policy]
        rows.append(
            {
                "policy": policy,
                "windows": len(own),
                "nodes_visited": sum(point.nodes_visited for point in own) / len(own),
                "load_max_over_mean": sum(point.load_max_over_mean for point in own) / len(own),
                "step_load_max_over_mean": sum(point.step_load_max_over_mean for point in own) / len(own),
                "copies": sum(point.copies for point in own),
                "moved_gb": sum(point.moved_bytes for point in own) / 1e9,
            }
        )
    return rows


def drift_table(points: Sequence[DriftPoint]) -> Table:
    table = Table(title="drift: every window served by what was planned before it", title_justify="left")
    for name in ("policy", "other nodes", "load max/mean", "per step", "experts copied", "GB moved"):
        table.add_column(name, justify="left" if name in LEFT else "right")
    for row in drift_summary(points):
        table.add_row(
            row["policy"],
            f"{row['nodes_visited']:.3f}",
            f"{row['load_max_over_mean']:.3f}",
            f"{row['step_load_max_over_mean']:.3f}",
            str(row["copies"]),
            f"{row['moved_gb']:.2f}",
        )
    return table


def chart_page(found: Sequence[Simulated], drifted: Sequence[DriftPoint], said: Sequence[str]) -> str:
    """One self-contained HTML file; names from outside are escaped."""
    figures = [figure for one in found for figure in (_pareto(one), _memory(one))]
    if drifted:
        figures.append(_drift(drifted))
    parts = "".join(figure.to_html(full_html=False, include_plotlyjs=False) for figure in figures)
    notes = "".join(f"<li>{escape_html(line)}</li>" for line in said)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>moetis simulate</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:auto;padding:1rem;"
        "color-scheme:light dark}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><h1>What if</h1><ul>{notes}</ul>{parts}</body></html>\n"
    )


def _pareto(found: Simulated) -> go.Figure:
    title = f"{found.model} on {found.topology}: slots against traffic; the larger, the less level"
    return _scatter(found, title, "slots, x experts", "KB a token between nodes", "times_experts", "node_kb_per_token")


def _memory(found: Simulated) -> go.Figure:
    title = f"{found.model} on {found.topology}: memory against step time"
    return _scatter(found, title, "GB of experts on a GPU", "step, ms", "expert_gb", "mean_s", 1e3)


def _scatter(
    found: Simulated, title: str, x: str, y: str, x_field: str, y_field: str, factor: float = 1.0
) -> go.Figure:
    figure = go.Figure()
    kinds = dict.fromkeys(_case(point) for point in found.points)
    for number, kind in enumerate(kinds):
        own = [point for point in found.points if _case(point) == kind]
        phase, planner, batch, nic = kind
        figure.add_scatter(
            x=[getattr(point, x_field) for point in own],
            y=[factor * getattr(point, y_field) for point in own],
            name=f"{planner}, {phase} {batch}/GPU, {nic:g} GB/s",
            mode="lines+markers",
            marker={
                "color": COLOURS[number % len(COLOURS)],
                "size": [8 + 40 * (point.step_imbalance - 1) for point in own],
                "symbol": ["circle" if point.pareto else "circle-open" for point in own],
            },
            text=[f"load max/mean {point.step_imbalance:.3f}, {1e3 * point.mean_s:.2f} ms" for point in own],
        )
    return figure.update_layout(title=escape_html(title), xaxis_title=x, yaxis_title=y, template="plotly_white")


def _drift(points: Sequence[DriftPoint]) -> go.Figure:
    figure = go.Figure()
    for policy in dict.fromkeys(point.policy for point in points):
        own = [point for point in points if point.policy == policy]
        figure.add_scatter(
            x=[point.window for point in own],
            y=[point.nodes_visited for point in own],
            name=policy,
            text=[f"load max/mean {point.load_max_over_mean:.3f}, {point.copies} copied" for point in own],
        )
    return figure.update_layout(
        title="drift", xaxis_title="window", yaxis_title="other nodes visited", template="plotly_white"
    )


def to_dict(
    models: Sequence[SimulatedModel],
    found: Sequence[Simulated],
    shared: Sequence[dict[str, Any]],
    drifted: Sequence[DriftPoint],
    said: Sequence[str],
) -> dict[str, Any]:
    return {
        "models": [{"name": model.name, "sizes": model.origin} for model in models],
        "approximations": list(said),
        "simulated": [
            {
                "model": one.model,
                "topology": one.topology,
                "points": [point.to_dict() for point in one.points],
                "memory": memory_rows(one),
            }
            for one in found
        ],
        "all_models": list(shared),
        "drift": {"summary": drift_summary(drifted), "points": [point.to_dict() for point in drifted]},
    }


def print_all(
    console: Console,
    found: Sequence[Simulated],
    shared: Sequence[dict[str, Any]],
    drifted: Sequence[DriftPoint],
    said: Sequence[str],
) -> None:
    for one in found:
        console.print(points_table(one))
        console.print(memory_table(one))
    if shared:
        console.print(shared_table(shared))
    if drifted:
        console.print(drift_table(drifted))
    for line in said:
        console.print(f"- {line}", markup=False)
