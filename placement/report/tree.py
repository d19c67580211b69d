"""The topology as a drawing: the tree of groups, each way as wide as the traffic that comes over it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from placement.report.traffic import Traffic
from placement.topology import Topology

MAX_DRAWN_RANKS, MAX_LABELLED = 32, 12
WIDTH, GUTTER, BOX_HEIGHT, ROW_HEIGHT = 760.0, 150.0, 22.0, 84.0
WIDEST = 11.0
LETTER = 7.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """What is drawn: traffic in a colour; scale: the visits to one group that are drawn widest."""

    topology: Topology
    traffic: Traffic
    colour: str
    scale: float

    @property
    def num_drawn(self) -> int:
        return min(self.topology.num_ranks, MAX_DRAWN_RANKS)


def draw_tree(topology: Topology, traffic: Traffic, colour: str, scale: float) -> str:
    """An SVG of the first ranks. scale: the visits per token and layer to one group that are drawn widest."""
    drawing = _Drawing(topology=topology, traffic=traffic, colour=colour, scale=scale)
    height = BOX_HEIGHT + ROW_HEIGHT * len(topology.levels) + 8
    rows = "".join(_row(drawing, level) for level in range(len(topology.levels)))
    totals = "; ".join(
        f"{traffic.visited(level):.2f} other groups of level {name}" for level, name in enumerate(topology.levels)
    )
    label = escape(f"tree of the topology; per token and layer a token visits {totals}")
    return (
        f'<div class="scroll" tabindex="0"><svg class="tree" role="img" aria-label="{label}" '
        f'viewBox="0 0 {WIDTH:g} {height:g}">{_box(0, (GUTTER + WIDTH) / 2, "cluster", 80)}{rows}</svg></div>'
    )


def _row(drawing: _Drawing, level: int) -> str:
    """One level: its caption, then each drawn group's way to its parent, and its box."""
    name = drawing.topology.levels[level]
    top = BOX_HEIGHT + ROW_HEIGHT * level
    middle = top + ROW_HEIGHT / 2
    caption = (
        f'<text x="0" y="{middle - 2:g}" class="level">{escape(_shortened(name, GUTTER))}</text>'
        f'<text x="0" y="{middle + 15:g}">{drawing.traffic.visited(level):.2f} others visited</text>'
    )
    groups = drawing.topology.groups[level, : drawing.num_drawn]
    parents = drawing.topology.groups[level - 1, : drawing.num_drawn] if level else np.zeros_like(groups)
    ways, boxes = "", ""
    for group in np.unique(groups).tolist():
        inside = groups == group
        x, bottom = _middle(inside), top + ROW_HEIGHT - BOX_HEIGHT
        visits = float(drawing.traffic.arrivals[level][group])
        width = 0.5 + WIDEST * visits / drawing.scale if drawing.scale else 0.5
        ways += (
            f'<line x1="{_middle(parents == parents[inside][0]):.1f}" y1="{top:g}" x2="{x:.1f}" y2="{bottom:g}" '
            f'stroke="{drawing.colour}" stroke-width="{width:.2f}"><title>{escape(name)} {group}: {visits:.3f} visits '
            f"per token and layer from homes elsewhere</title></line>"
        )
        if len(np.unique(groups)) <= MAX_LABELLED:
            ways += f'<text class="visits" x="{x:.1f}" y="{bottom - 8:g}" text-anchor="middle">{visits:.2f}</text>'
        text = f"{group}" if level == len(drawing.topology.levels) - 1 else f"{name} {group}"
        room = (WIDTH - GUTTER) / len(groups) * int(inside.sum()) - 4
        boxes += _box(bottom, x, text, min(room, 90))
    return caption + ways + boxes


def _middle(inside: NDArray[np.bool_]) -> float:
    """The middle of the drawn ranks that a mask picks."""
    spacing = (WIDTH - GUTTER) / len(inside)
    return float(GUTTER + spacing * (np.flatnonzero(inside).mean() + 0.5))


def _box(y: float, x: float, name: str, width: float) -> str:
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y:g}" width="{width:.1f}" height="{BOX_HEIGHT:g}" rx="3"/>'
        f'<text x="{x:.1f}" y="{y + 15:g}" text-anchor="middle">{escape(_shortened(name, width))}</text>'
    )


def _shortened(name: str, width: float) -> str:
    """As much of a name as fits."""
    fits = int(width / LETTER)
    return name if len(name) <= fits else f"{name[: max(0, fits - 1)]}…"
