"""Pieces of HTML. Whatever comes in as text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

CHART_CONFIG = {"responsive": True, "displayModeBar": False, "scrollZoom": False}


def section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def look(text: str) -> str:
    """A line that says how to read what follows."""
    return f'<p class="look">{escape(text)}</p>'


def chart(figure: go.Figure, label: str) -> str:
    """A chart that a screen reader announces by its label; the table beside it has the numbers."""
    html: str = figure.to_html(full_html=False, include_plotlyjs=False, config=CHART_CONFIG)
    return f'<div role="img" aria-label="{escape(label)}">{html}</div>'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, dense: bool = False) -> str:
    """The first cell of a row is its header. dense: small type, for tables of many columns."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    kind = ' class="dense"' if dense else ""
    return (
        f'<div class="scroll" tabindex="0"><table{kind}><caption>{escape(caption)}</caption><thead><tr>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>"
