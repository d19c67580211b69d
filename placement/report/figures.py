"""The charts of a report, as what plotly.js reads. Labels are numbers and our own words: a name from outside is never
drawn as chart text, which Plotly takes for markup.

One colour, one meaning on the whole page: a colour for each placement, one for migration, Viridis for intensity. Cells
of heat maps travel as 16-bit numbers (see `pack`), which the page's script unpacks.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.report.activation import Activation
from placement.report.affinity import PairMap
from placement.report.cachecurve import CacheCurve
from placement.report.measured import LABELS
from placement.report.memory import TIERS
from placement.report.noun import Report
from placement.report.numbers import tick_step
from placement.report.tables import name_ranks, placements

GRID, INK = "rgba(128,128,128,0.25)", "#808080"
COLOURS = {"before": "#9a9a9a", "eplb": "#e08a00", "after": "#2f7ed8", "after_routed_homes": "#12a187"}
TIER_COLOURS = ("#c0392b", "#e08a00", "#5b8db8", "#9a9a9a")
VISITS = {"nodes_visited": "other nodes", "ranks_visited": "other ranks"}
MIGRATION_COLOUR = "#9b59b6"
LOAD_ORDERS = ("expert, by number", "place in the layer, busiest expert first")
MAX_CELLS, MAX_TICKS, MISSING = 60_000, 20, 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """data, layout: Plotly's, of the first variant. variants: for each, what of data[0] and of the layout it replaces.

    rows, columns: what a reader calls the two axes of a heat map, 'layer' and 'expert'; empty for other charts.
    """

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    rows: str = ""
    columns: str = ""
    variants: list[dict[str, Any]] = field(default_factory=list)


def pack(cells: NDArray[Any]) -> dict[str, Any]:
    """[n, m] numbers from 0 up as base64 of little-endian 16-bit integers, to be multiplied by scale; NaN is 65535."""
    largest = float(np.nanmax(cells)) if cells.size and not np.isnan(cells).all() else 0.0
    scale = largest / (MISSING - 1) or 1.0
    words = np.where(np.isnan(cells), MISSING, np.round(np.nan_to_num(cells) / scale)).astype("<u2")
    return {"packed": base64.b64encode(words.tobytes()).decode(), "columns": cells.shape[1], "scale": scale}


def load_heat_map(report: Report) -> Figure:
    """Experts by layer, busiest first in each layer, and by number where all fit: the variants of LOAD_ORDERS.

    The hover names the expert and its ranks.
    """
    num_layers, num_experts = report.load.shape
    orders = [np.argsort(-report.load, axis=1, kind="stable")[:, : max(1, MAX_CELLS // num_layers)]]
    if orders[0].shape[1] == num_experts:
        orders.insert(0, np.tile(np.arange(num_experts), (num_layers, 1)))
    names = [
        {str(expert): name_ranks(holders[expert]) for expert in shown}
        for holders, shown in zip(report.holders, orders[-1].tolist(), strict=True)
    ]
    variants = [
        {
            "z": pack(np.take_along_axis(report.load, order, axis=1)),
            "experts": pack(order.astype(np.float64)),
            "axes": {"xaxis": {"title": {"text": title}}},
        }
        for order, title in zip(orders, LOAD_ORDERS[-len(orders) :], strict=True)
    ]
    trace = _heat("load over the layer's mean", "layer %{y}<br>expert %{text}<br>load %{z:.2f} x the mean")
    layout = _layout("expert", "layer", height=190 + 14 * min(num_layers, 60), top=70)
    _whole_ticks(layout["xaxis"], orders[0].shape[1])
    _whole_ticks(layout["yaxis"], num_layers)
    layout["yaxis"]["autorange"] = "reversed"
    trace["holders"] = names
    return Figure(data=[trace], layout=layout, rows="layer", columns="expert", variants=variants)


def activation_map(found: Activation) -> Figure:
    """Positions by expert; a variant for each kind and layer, kinds outermost."""
    bins, experts = found.bins, list(range(found.share.shape[3]))
    variants = [{"z": pack(100 * layer)} for kind in found.share for layer in kind]
    trace = _heat("% of tokens that choose it", "positions %{y}<br>expert %{x}<br>%{z:.2f}% of tokens")
    trace |= {"x": experts, "y": bins}
    layout = _layout("expert", "position in the request", height=170 + 16 * len(bins), top=70)
    _whole_ticks(layout["xaxis"], len(experts))
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return Figure(data=[trace], layout=layout, rows="positions", columns="expert", variants=variants)


def pair_map(maps: tuple[PairMap, ...], rows: str, columns: str) -> Figure:
    """Pairs of experts that tokens use together, experts in the order of their ranks; a variant a map."""
    variants = []
    for one in maps:
        names = [[str(expert) for expert in order.tolist()] for order in (one.columns, one.rows)]
        ticks = [labels[:: tick_step(len(labels), MAX_TICKS)] for labels in names]
        variants.append(
            {
                "z": pack(100 * one.share),
                "x": names[0],
                "y": names[1],
                "axes": {"xaxis": {"tickvals": ticks[0]}, "yaxis": {"tickvals": ticks[1]}},
            }
        )
    trace = _heat("% of tokens that use both", f"{rows} %{{y}}, {columns} %{{x}}<br>%{{z:.2f}}% of tokens")
    layout = _layout(f"{columns}, by rank", f"{rows}, by rank", height=520, top=70)
    layout["xaxis"] |= {"type": "category"}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return Figure(data=[trace], layout=layout, rows=rows, columns=columns, variants=variants)


def rank_load_bars(report: Report) -> Figure:
    """Load per rank over the mean, before and with the plan."""
    data = [
        {
            "type": "bar",
            "y": _rounded(traffic.load),
            "name": LABELS[name],
            "marker": {"color": COLOURS[name]},
            "hovertemplate": "rank %{x}: %{y:.3f} x the mean<extra>%{fullData.name}</extra>",
        }
        for name, traffic in placements(report)
    ]
    layout = _layout("rank", "load / mean", height=320)
    mean = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"color": INK, "dash": "dot"}}
    layout["shapes"] = [mean]
    _whole_ticks(layout["xaxis"], len(report.traffic_after.load))
    return Figure(data=data, layout=layout)


def memory_bars(report: Report) -> Figure:
    """Slots of each rank by tier, all layers together."""
    memory = report.memory
    parts = [(TIERS[tier], memory.slots[:, tier], TIER_COLOURS[tier]) for tier in memory.tiers]
    if memory.empty.any():
        parts.append(("empty", memory.empty, "rgba(128,128,128,0.3)"))
    data = [
        {
            "type": "bar",
            "y": slots.tolist(),
            "name": name,
            "marker": {"color": colour},
            "hovertemplate": "rank %{x}: %{y} slots<extra>%{fullData.name}</extra>",
        }
        for name, slots, colour in parts
    ]
    layout = _layout("rank", "slots of all layers", height=300) | {"barmode": "stack"}
    _whole_ticks(layout["xaxis"], len(memory.empty))
    return Figure(data=data, layout=layout)


def score_bars(report: Report) -> Figure:
    """Other nodes and other ranks visited per token and layer, a bar for each placement."""
    scores = report.measured.scores
    known = [visits for visits in VISITS if any(visits in score for score in scores.values())]
    data = [
        {
            "type": "bar",
            "x": [VISITS[visits] for visits in known],
            "y": [score.get(visits) for visits in known],
            "name": LABELS[name],
            "marker": {"color": COLOURS[name]},
            "hovertemplate": "%{x}: %{y:.3f}<extra>%{fullData.name}</extra>",
        }
        for name, score in scores.items()
    ]
    return Figure(data=data, layout=_layout("", "visits per token and layer", height=340))


def migration_bars(report: Report) -> Figure:
    """Experts copied in each round."""
    moves = [step.moves for step in report.rounds]
    bars = {
        "type": "bar",
        "x": list(range(1, len(moves) + 1)),
        "y": moves,
        "name": "copies",
        "marker": {"color": MIGRATION_COLOUR},
        "hovertemplate": "round %{x}: %{y} experts<extra></extra>",
    }
    layout = _layout("round", "experts copied", height=280) | {"showlegend": False}
    _whole_ticks(layout["xaxis"], len(moves))
    layout["xaxis"]["tick0"] = 1 if len(moves) <= MAX_TICKS else 0
    _whole_ticks(layout["yaxis"], max(moves), most=6)
    return Figure(data=[bars], layout=layout)


def cache_lines(curve: CacheCurve) -> Figure:
    """Hit rate by slots: least recently used, and Belady's bound."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": curve.slots.tolist(),
            "y": _rounded(100 * share),
            "name": name,
            "line": {"color": colour, "dash": dash},
            "hovertemplate": "%{x} slots: %{y:.1f}% hit<extra>%{fullData.name}</extra>",
        }
        for name, share, colour, dash in (
            ("least recently used", curve.lru, COLOURS["after"], "solid"),
            ("best possible (Belady)", curve.belady, INK, "dash"),
        )
    ]
    layout = _layout("GPU slots per layer and rank", "reads that hit, %", height=340)
    layout["yaxis"]["range"] = [0, 101]
    _whole_ticks(layout["xaxis"], int(curve.slots.max()))
    return Figure(data=data, layout=layout)


def _heat(title: str, hover: str) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "colorscale": "Viridis",
        "colorbar": {
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "thickness": 12,
            "len": 0.7,
            "title": {"text": title, "side": "top"},
        },
        "hovertemplate": f"{hover}<extra></extra>",
    }


def _rounded(values: NDArray[np.float64]) -> list[float]:
    rounded: list[float] = np.round(values, 5).tolist()
    return rounded


def _whole_ticks(axis: dict[str, Any], count: int, most: int = MAX_TICKS) -> None:
    axis |= {"tickmode": "linear", "tick0": 0, "dtick": tick_step(count, most), "tickformat": "d"}


def _layout(x: str, y: str, *, height: int, top: int = 45) -> dict[str, Any]:
    """Transparent, so that it lies on a light and on a dark page; the page's style sheet gives the text its colour."""
    axes = {
        name: {"title": {"text": title, "standoff": 8}, "gridcolor": GRID, "automargin": True}
        for name, title in (("xaxis", x), ("yaxis", y))
    }
    return axes | {
        "height": height,
        "margin": {"l": 55, "r": 10, "t": top, "b": 50},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK},
        "hoverlabel": {"bgcolor": "#20242b", "font": {"color": "#ffffff"}},
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
