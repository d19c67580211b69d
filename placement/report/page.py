"""The page: one HTML file with everything in it. Whatever came from outside is escaped."""

from __future__ import annotations

from html import escape

from plotly.offline import get_plotlyjs

from placement.report import sections
from placement.report.markup import section
from placement.report.noun import Report
from placement.report.style import SCRIPT, STYLE
from placement.report.verdict import judge
from placement.report.words import evidence


def render_html(report: Report) -> str:
    """The report as one file that works offline."""
    parts = [
        section("Before and after", sections.scores(report)),
        section("Measured live", sections.live(report.live)) if report.live else "",
        section("Topology and traffic", sections.topology(report)),
        section("Load of the ranks", sections.rank_load(report)),
        section("Load of the experts", sections.expert_load(report)),
        section("Experts used together", sections.together(report)),
        section("Migration", sections.migration(report)) if report.rounds else "",
    ]
    evidence_items = "".join(f"<li>{escape(line)}</li>" for line in evidence(report))
    workloads = f"<p>Workloads: {escape(', '.join(report.workloads))}.</p>" if report.workloads else ""
    title = escape(report.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><main><h1>{title}</h1><p>{_about(report)}</p>"
        f'<p class="verdict">{escape(judge(report.measured).text)}</p><ul>{evidence_items}</ul>{workloads}'
        f"{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _about(report: Report) -> str:
    placement, topology = report.plan.placement, report.topology
    return escape(
        f"Model {report.model or 'of the trace'}: {placement.num_layers} MoE layers x {placement.num_experts} experts. "
        f"{placement.num_ranks:,} ranks in {topology.num_nodes:,} nodes ({topology.name}), {placement.rows_per_rank} "
        f"slots per layer on each; epoch {placement.epoch}."
    )
