"""The charts of a report. Labels are numbers and ranks only: nothing from outside is drawn as text."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from placement.report.noun import Report

INK = "#808080"
BEFORE_COLOUR, AFTER_COLOUR = "#a0a0a0", "#2f7ed8"
MAX_CELLS = 40_000


def load_heat_map(report: Report) -> go.Figure:
    """Experts (columns, busiest first in each layer) by layer; the hover names the expert and its ranks."""
    order = np.argsort(-report.load, axis=1)
    busiest = order[:, : max(1, MAX_CELLS // report.load.shape[0])]
    names = [
        [f"{expert} on {_ranks(report.holders[layer][expert])}" for expert in row] for layer, row in enumerate(busiest)
    ]
    figure = go.Figure(
        go.Heatmap(
            z=np.round(np.take_along_axis(report.load, busiest, axis=1), 2),
            text=names,
            colorscale="Viridis",
            colorbar={"title": "load / mean"},
            hovertemplate="layer %{y}<br>expert %{text}<br>load %{z} x the mean<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed")
    return _styled(figure, "experts of a layer, busiest first", "layer", height=120 + 16 * min(len(order), 60))


def coactivation_map(report: Report, index: int) -> go.Figure:
    """Pairs of experts of one layer that tokens use together, experts in the order of their ranks."""
    _, order, share = report.coactivation[index]
    labels = [f"{expert}" for expert in order]
    figure = go.Figure(
        go.Heatmap(
            z=np.round(100 * share, 2),
            x=labels,
            y=labels,
            colorscale="Viridis",
            colorbar={"title": "% of tokens"},
            hovertemplate="experts %{x} and %{y}<br>%{z}% of tokens<extra></extra>",
        )
    )
    figure.update_xaxes(type="category", showticklabels=len(labels) <= 64)
    figure.update_yaxes(type="category", autorange="reversed", showticklabels=len(labels) <= 64)
    return _styled(figure, "expert, by rank", "expert, by rank", height=480)


def rank_load_bars(report: Report) -> go.Figure:
    """Load per rank over the mean, before and after."""
    ranks = [f"{rank}" for rank in range(len(report.rank_load_after))]
    figure = go.Figure()
    if report.rank_load_before is not None:
        figure.add_bar(x=ranks, y=np.round(report.rank_load_before, 3), name="before", marker_color=BEFORE_COLOUR)
    figure.add_bar(x=ranks, y=np.round(report.rank_load_after, 3), name="after", marker_color=AFTER_COLOUR)
    figure.add_hline(y=1, line_color=INK, line_dash="dot")
    figure.update_xaxes(type="category")
    return _styled(figure, "rank", "load / mean", height=320)


def score_bars(report: Report, labels: dict[str, str]) -> go.Figure:
    """Other nodes and other ranks visited per token and layer, one group of bars a placement."""
    names = [name for name in labels if name in report.scores]
    figure = go.Figure()
    for figure_name, text, colour in (
        ("nodes_visited", "other nodes", AFTER_COLOUR),
        ("ranks_visited", "other ranks", BEFORE_COLOUR),
    ):
        figure.add_bar(
            x=[labels[name] for name in names],
            y=[round(report.scores[name][figure_name], 3) for name in names],
            name=text,
            marker_color=colour,
        )
    return _styled(figure, "", "visits per token and layer", height=320)


def migration_bars(report: Report) -> go.Figure:
    """Experts copied in each round."""
    rounds = [f"{number + 1}" for number in range(len(report.rounds))]
    figure = go.Figure(go.Bar(x=rounds, y=[step.moves for step in report.rounds], marker_color=AFTER_COLOUR))
    figure.update_xaxes(type="category")
    return _styled(figure, "round", "experts copied", height=280)


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _styled(figure: go.Figure, x: str, y: str, *, height: int) -> go.Figure:
    """Transparent, grey ink: readable on a light and on a dark page."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 10, "t": 20, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK},
        legend={"orientation": "h", "y": 1.12},
    )
    figure.update_xaxes(title=x, gridcolor="rgba(128,128,128,0.2)")
    figure.update_yaxes(title=y, gridcolor="rgba(128,128,128,0.2)")
    return figure
