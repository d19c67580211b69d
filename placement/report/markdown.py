"""The report as Markdown, for tickets and wikis. Names from outside make no markup, no HTML and no link there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from placement.report.noun import Report
from placement.report.outline import chapters
from placement.report.tables import Table
from placement.report.verdict import judge
from placement.report.words import about, evidence


def render_markdown(report: Report) -> str:
    """GitHub's flavour. Charts are left out, their tables are there."""
    lines = [f"# {escaped(report.title)}", "", escaped(about(report)), ""]
    lines += [f"**{escaped(judge(report.measured, report.part).text)}**", ""]
    lines += [f"- {escaped(line)}" for line in evidence(report)]
    if report.workloads:
        lines += ["", f"Workloads: {escaped(', '.join(report.workloads))}."]
    for chapter in chapters(report):
        lines += ["", f"## {chapter.heading}", ""]
        if chapter.text:
            lines += [escaped(chapter.text), ""]
        for table in chapter.tables:
            lines += _table(table)
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    ruler = "|".join([" --- ", *(" ---: " for _ in table.head[1:])])
    return [f"*{escaped(table.caption)}*", "", _row(table.head), f"|{ruler}|", *map(_row, table.rows), ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def escaped(text: str) -> str:
    """Text as itself: no markup, no HTML, no link, no line break."""
    plain = re.sub(r"\s+", " ", "".join(char if char.isprintable() else " " for char in text))
    marked = re.sub(r"([\\`*_\[\]{}#|~!])", r"\\\1", plain).replace("&", "&amp;").replace("<", "&lt;")
    # A bare address or mention becomes a link without any markup.
    return (
        marked.replace(">", "&gt;").replace("://", "&#58;//").replace("@", "&#64;").replace("www.", "www&#46;").strip()
    )
