"""The charts of a report. Labels are numbers and ranks only: nothing from outside is drawn as text.

One colour, one meaning on the whole page: a colour for each placement, one for migration, Viridis for intensity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from placement.report.measured import LABELS
from placement.report.noun import Report
from placement.report.numbers import tick_step

GRID, INK = "rgba(128,128,128,0.25)", "#808080"
COLOURS = {"before": "#9a9a9a", "eplb": "#e08a00", "after": "#2f7ed8", "after_routed_homes": "#12a187"}
VISITS = {"nodes_visited": "other nodes", "ranks_visited": "other ranks"}
MIGRATION_COLOUR = "#9b59b6"
MAX_CELLS, MAX_NAMED_RANKS, MAX_TICKS = 20_000, 8, 20
COLOUR_BAR = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "thickness": 12, "len": 0.7}


def load_heat_map(report: Report) -> go.Figure:
    """Experts (columns, busiest first in each layer) by layer; the hover names the expert and its ranks."""
    num_layers = report.load.shape[0]
    busiest = np.argsort(-report.load, axis=1)[:, : max(1, MAX_CELLS // num_layers)]
    names = [
        [f"{expert} on {name_ranks(report.holders[layer][expert])}" for expert in row]
        for layer, row in enumerate(busiest.tolist())
    ]
    figure = go.Figure(
        go.Heatmap(
            z=np.take_along_axis(report.load, busiest, axis=1).astype(np.float32),
            text=names,
            colorscale="Viridis",
            colorbar=COLOUR_BAR | {"title": {"text": "load over the layer's mean", "side": "top"}},
            hovertemplate="layer %{y}<br>expert %{text}<br>load %{z:.2f} x the mean<extra></extra>",
        )
    )
    _whole_ticks(figure.layout.xaxis, busiest.shape[1])
    _whole_ticks(figure.layout.yaxis, num_layers)
    figure.update_yaxes(autorange="reversed")
    height = 170 + 16 * min(num_layers, 60)
    return _styled(figure, "place in the layer, busiest expert first", "layer", height=height, top=70)


def coactivation_map(report: Report, index: int) -> go.Figure:
    """Pairs of experts of one layer that tokens use together, experts in the order of their ranks."""
    _, order, share = report.coactivation[index]
    labels = [str(expert) for expert in order.tolist()]
    figure = go.Figure(
        go.Heatmap(
            z=(100 * share).astype(np.float32),
            x=labels,
            y=labels,
            colorscale="Viridis",
            colorbar=COLOUR_BAR | {"title": {"text": "% of tokens that use both", "side": "top"}},
            hovertemplate="experts %{x} and %{y}<br>%{z:.2f}% of tokens<extra></extra>",
        )
    )
    ticks = labels[:: tick_step(len(labels), MAX_TICKS)]
    figure.update_xaxes(type="category", tickvals=ticks)
    figure.update_yaxes(type="category", tickvals=ticks, autorange="reversed")
    return _styled(figure, "expert, by rank", "expert, by rank", height=520, top=70)


def rank_load_bars(report: Report) -> go.Figure:
    """Load per rank over the mean, before and with the plan."""
    figure = go.Figure()
    for name, traffic in (("before", report.traffic_before), ("after", report.traffic_after)):
        if traffic is not None:
            load = traffic.load.astype(np.float32)
            figure.add_bar(x=np.arange(len(load)), y=load, name=LABELS[name], marker_color=COLOURS[name])
    figure.add_hline(y=1, line_color=INK, line_dash="dot")
    figure.update_traces(hovertemplate="rank %{x}: %{y:.3f} x the mean<extra>%{fullData.name}</extra>")
    _whole_ticks(figure.layout.xaxis, len(report.traffic_after.load))
    return _styled(figure, "rank", "load / mean", height=320)


def score_bars(report: Report) -> go.Figure:
    """Other nodes and other ranks visited per token and layer, a bar for each placement."""
    scores = report.measured.scores
    known = [visits for visits in VISITS if any(visits in score for score in scores.values())]
    figure = go.Figure()
    for name, score in scores.items():
        figure.add_bar(
            x=[VISITS[visits] for visits in known],
            y=[score.get(visits) for visits in known],
            name=LABELS[name],
            marker_color=COLOURS[name],
            hovertemplate="%{x}: %{y:.3f}<extra>%{fullData.name}</extra>",
        )
    return _styled(figure, "", "visits per token and layer", height=340)


def migration_bars(report: Report) -> go.Figure:
    """Experts copied in each round."""
    numbers = np.arange(1, len(report.rounds) + 1)
    moves = [step.moves for step in report.rounds]
    figure = go.Figure(go.Bar(x=numbers, y=moves, name="copies", showlegend=False, marker_color=MIGRATION_COLOUR))
    figure.update_traces(hovertemplate="round %{x}: %{y} experts<extra></extra>")
    _whole_ticks(figure.layout.xaxis, len(numbers))
    figure.update_xaxes(tick0=1 if len(numbers) <= MAX_TICKS else 0)
    _whole_ticks(figure.layout.yaxis, max(moves), most=6)
    return _styled(figure, "round", "experts copied", height=280)


def name_ranks(ranks: tuple[int, ...]) -> str:
    """'0, 3, 5', and only the first of very many."""
    named = ", ".join(str(rank) for rank in ranks[:MAX_NAMED_RANKS])
    more = len(ranks) - MAX_NAMED_RANKS
    return f"{named} and {more} more" if more > 0 else named


def _whole_ticks(axis: Any, count: int, most: int = MAX_TICKS) -> None:
    axis.update(tickmode="linear", tick0=0, dtick=tick_step(count, most), tickformat="d")


def _styled(figure: go.Figure, x: str, y: str, *, height: int, top: int = 45) -> go.Figure:
    """Transparent, so that it lies on a light and on a dark page; the page's style sheet gives the text its colour."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 55, "r": 10, "t": top, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK},
        hoverlabel={"bgcolor": "#20242b", "font": {"color": "#ffffff"}},
        dragmode=False,
        showlegend=True,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    figure.update_xaxes(title={"text": x, "standoff": 8}, gridcolor=GRID, automargin=True)
    figure.update_yaxes(title={"text": y, "standoff": 8}, gridcolor=GRID, automargin=True)
    return figure
