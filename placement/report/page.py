"""The page: one HTML file with everything in it. Whatever came from outside is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from placement.report import figures
from placement.report.noun import LiveFigure, Report
from placement.report.words import LABELS, ROWS, evidence, verdict

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #d0d0d0; --soft: #f3f5f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #15181d; --line: #3a3f47; --soft: #20242b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       padding: 1rem; max-width: 62rem; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 0.3rem; }
.verdict { font-size: 1.1rem; background: var(--soft); border-left: 4px solid #2f7ed8; padding: 0.7rem 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 0.5rem 0; }
caption { text-align: left; font-size: 0.9rem; padding-bottom: 0.3rem; }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
details { margin: 0.4rem 0; } summary { cursor: pointer; } p.look { margin: 0.2rem 0; }
pre { background: var(--soft); padding: 0.7rem; overflow-x: auto; }
@media print { details { display: none; } }
"""


def render_html(report: Report) -> str:
    """The report as one file that works offline."""
    sections = [
        _section("Before and after", _scores(report)),
        _section("Measured live", _live(report.live)) if report.live else "",
        _section("Load of the experts", _load(report)),
        _section("Load of the ranks", _ranks(report)),
        _section("Experts used together", _together(report)),
        _section("Topology", _topology(report)),
        _section("Migration", _migration(report)) if report.rounds else "",
    ]
    evidence_items = "".join(f"<li>{escape(line)}</li>" for line in evidence(report))
    placement, topology = report.plan.placement, report.topology
    about = (
        f"Model {escape(report.model or 'of the trace')}: {placement.num_layers} MoE layers x {placement.num_experts} "
        f"experts. {placement.num_ranks} ranks in {topology.num_nodes} nodes ({escape(topology.name)}), "
        f"{placement.rows_per_rank} slots per layer on each; epoch {placement.epoch}."
    )
    workloads = f"<p>Workloads: {escape(', '.join(report.workloads))}.</p>" if report.workloads else ""
    title = escape(report.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><main><h1>{title}</h1><p>{about}</p>"
        f'<p class="verdict">{escape(verdict(report))}</p><ul>{evidence_items}</ul>{workloads}'
        f"{''.join(sections)}</main></body></html>\n"
    )


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def _chart(figure: go.Figure) -> str:
    html: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"responsive": True, "displaylogo": False}
    )
    return html


def _look(text: str) -> str:
    return f'<p class="look">{escape(text)}</p>'


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _folded(table: str) -> str:
    return f"<details><summary>as a table</summary>{table}</details>"


def _scores(report: Report) -> str:
    names = [name for name in LABELS if name in report.scores]
    if not names:
        return _look("This plan carries no measured figures.")
    rows = [[label, *(f"{report.scores[name][figure]:.3f}" for name in names)] for figure, label in ROWS]
    table = _table("on held-out requests", ["", *(LABELS[name] for name in names)], rows)
    look = _look("Shorter is better: each visit carries a token's hidden state out and back. EPLB balances load alone.")
    return table + look + _chart(figures.score_bars(report, LABELS))


def _live(live: Sequence[LiveFigure]) -> str:
    rows = [
        [
            figure.name,
            "" if figure.before is None else _number(figure.before, figure.unit),
            _number(figure.after, figure.unit),
        ]
        for figure in live
    ]
    return _table("counted by the ranks while they served", ["", "before", "after"], rows)


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f} %"
    shown = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}".strip()


def _load(report: Report) -> str:
    look = _look(
        "Each row is a layer. A bright left edge: few experts carry much of the layer, and copies of them pay."
    )
    busiest = report.load.argmax(axis=1)
    rows = [
        [
            str(layer),
            str(expert),
            f"{report.load[layer, expert]:.2f}",
            ", ".join(map(str, report.holders[layer][expert])),
            str(sum(len(ranks) > 1 for ranks in report.holders[layer])),
        ]
        for layer, expert in enumerate(busiest.tolist())
    ]
    head = ["layer", "busiest expert", "its load / mean", "on ranks", "experts with copies"]
    return look + _chart(figures.load_heat_map(report)) + _folded(_table("busiest expert of each layer", head, rows))


def _ranks(report: Report) -> str:
    look = _look("The tallest bar sets the pace of every step; 1 is the mean.")
    before = report.rank_load_before
    rows = [
        [str(rank), "" if before is None else f"{before[rank]:.3f}", f"{load:.3f}"]
        for rank, load in enumerate(report.rank_load_after)
    ]
    table = _table("pairs of token and expert served, over the mean of the ranks", ["rank", "before", "after"], rows)
    return look + _chart(figures.rank_load_bars(report)) + _folded(table)


def _together(report: Report) -> str:
    look = _look(
        "Experts stand in the order of their ranks: bright blocks on the diagonal mean that tokens stay together."
    )
    parts = []
    for index, (layer, order, share) in enumerate(report.coactivation):
        strongest = sorted(
            ((float(share[i, j]), int(order[i]), int(order[j])) for i in range(len(order)) for j in range(i)),
            reverse=True,
        )[:10]
        rows = [[f"{one}, {other}", f"{value:.1%}"] for value, one, other in strongest]
        table = _folded(_table(f"strongest pairs of layer {layer}", ["experts", "tokens that use both"], rows))
        shown = " open" if index == 0 else ""
        parts.append(
            f"<details{shown}><summary>layer {layer}</summary>{_chart(figures.coactivation_map(report, index))}{table}"
            f"</details>"
        )
    return look + "".join(parts)


def _topology(report: Report) -> str:
    topology = report.topology
    rows = [
        [name, str(int(groups[-1]) + 1), f"{link.bandwidth / 1e9:g} GB/s", f"{link.latency_s * 1e6:g} us"]
        for name, groups, link in zip(topology.levels, topology.groups, topology.links, strict=True)
    ]
    nodes = topology.node_of_rank()
    tree = "\n".join(
        f"node {node}: ranks {', '.join(str(rank) for rank in range(topology.num_ranks) if nodes[rank] == node)}"
        for node in range(topology.num_nodes)
    )
    table = _table("links of one group to its siblings", ["level", "groups", "bandwidth", "latency"], rows)
    return f"{table}<pre>{escape(tree)}</pre>"


def _migration(report: Report) -> str:
    moves, total = sum(step.moves for step in report.rounds), sum(step.num_bytes for step in report.rounds)
    slots = int((report.plan.placement.physical_to_logical >= 0).sum())
    size = f", {total / 1e6:,.1f} MB" if total > moves else ""
    look = _look(
        f"{moves:,} of {slots:,} experts are copied{size}, in {len(report.rounds)} rounds; in a round no rank has "
        f"more than one peer. The old placement serves until all is copied and checked."
    )
    rows = [
        [str(number + 1), str(step.pairs), str(step.moves), f"{step.num_bytes / 1e6:,.1f} MB" if size else ""]
        for number, step in enumerate(report.rounds)
    ]
    table = _table("rounds", ["round", "pairs of ranks", "experts", "bytes"], rows)
    return look + _chart(figures.migration_bars(report)) + _folded(table)
