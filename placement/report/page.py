"""The page: one HTML file with everything in it. Whatever came from outside is escaped."""

from __future__ import annotations

import gzip
from base64 import b64encode
from html import escape
from importlib.resources import files

from placement.report import sections
from placement.report.markup import section
from placement.report.noun import Report
from placement.report.verdict import judge
from placement.report.words import about, evidence

NO_SCRIPT = "<noscript><p>Without scripts charts are not drawn; the tables have their numbers.</p></noscript>"


def render_html(report: Report) -> str:
    """The report as one file that works offline. Charts are drawn by plotly.js, after the text is there to be read."""
    rows = report.plan.placement.rows_per_rank
    shown = [
        ("scores", "Before and after", sections.scores(report)),
        ("live", "Measured live", sections.live(report) if report.live else ""),
        ("topology", "Topology and traffic", sections.topology(report) if report.traffic_after.arrivals else ""),
        ("ranks", "Load and memory of the ranks", sections.ranks(report)),
        ("experts", "Load of the experts", sections.expert_load(report)),
        ("positions", "Experts by position", sections.activation(report.activation) if report.activation else ""),
        ("together", "Experts used together", sections.together(report) if report.coactivation else ""),
        ("transitions", "From layer to layer", sections.transitions(report) if report.transitions else ""),
        ("migration", "Migration", sections.migration(report) if report.rounds else ""),
        ("cache", "Cache", sections.cache(report.cache, rows) if report.cache else ""),
        ("past", "Past plans", sections.past(report) if report.past else ""),
    ]
    links = "".join(f'<a href="#{name}">{escape(heading)}</a> ' for name, heading, content in shown if content)
    body = "".join(section(name, heading, content) for name, heading, content in shown if content)
    evidence_items = "".join(f"<li>{escape(line)}</li>" for line in evidence(report))
    workloads = f"<p>Workloads: {escape(', '.join(report.workloads))}.</p>" if report.workloads else ""
    title, verdict = escape(report.title), judge(report.measured, report.part)
    kind = verdict.decision.value.replace(" ", "-")
    assets = files("placement.report")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{(assets / 'page.css').read_text()}</style></head><body>"
        f'<header><h1>{title}</h1><button id="theme" type="button">Theme: system</button></header>'
        f'<main><p>{escape(about(report))}</p><p class="verdict {kind}">{escape(verdict.text)}</p>'
        f'<ul>{evidence_items}</ul>{workloads}<nav aria-label="sections">{links}</nav>{NO_SCRIPT}{body}</main>'
        f'<script type="application/gzip" id="library">{_library()}</script>'
        f"<script>{(assets / 'page.js').read_text()}</script></body></html>\n"
    )


def _library() -> str:
    """plotly.js, packed: 4.8 MB become 1.9, and the text can be read before the browser unpacks it."""
    source = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return b64encode(gzip.compress(source, mtime=0)).decode()
