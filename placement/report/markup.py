"""Pieces of HTML. Whatever comes in as text is escaped here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from placement.report.figures import Figure
from placement.report.tables import Table

KEYS = "arrow keys read its numbers"


def section(name: str, heading: str, content: str) -> str:
    """name: an id of our own, for links."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{escape(heading)}</h2>{content}</section>'
    )


def look(text: str) -> str:
    """A line that says how to read what follows."""
    return f'<p class="look">{escape(text)}</p>'


def chart(name: str, figure: Figure, label: str, pickers: Sequence[tuple[str, Sequence[str]]] = ()) -> str:
    """A chart that the page's script draws once it is in sight. name: an id of our own.

    pickers: (what, choices) of drop-down lists; together they pick the figure's variant, the first one outermost. The
    script also writes all of the chart's numbers as a table, when it is asked for.
    """
    lists = "".join(
        f"<label>{escape(what)} <select>{''.join(f'<option>{escape(choice)}</option>' for choice in choices)}"
        f"</select></label>"
        for what, choices in pickers
    )
    return (
        f'<div class="chart" id="chart-{name}">{f"<p class=pickers>{lists}</p>" if lists else ""}'
        f'<div class="plot" tabindex="0" role="application" aria-roledescription="chart" '
        f'aria-label="{escape(label)}; {KEYS}" style="min-height:{figure.layout["height"]}px"></div>'
        f'<p class="reading" aria-live="polite"></p><script type="application/json">{_json(figure)}</script>'
        f'<details class="all"><summary>all numbers of this chart</summary><div class="scroll" tabindex="0"></div>'
        f"</details></div>"
    )


def _json(figure: Figure) -> str:
    """JSON that can't end the script element it lies in."""
    text = json.dumps(asdict(figure), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def table(content: Table) -> str:
    """The first cell of a row is its header."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in content.head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in content.rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><caption>{escape(content.caption)}</caption><thead><tr>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, content: Table) -> str:
    return f"<details><summary>{escape(summary)}, as a table</summary>{table(content)}</details>"
