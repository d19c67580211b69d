"""The tables of a report, as text in cells: the page, Markdown and people who can't see a chart all read these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.report.activation import Activation, evenly
from placement.report.cachecurve import CacheCurve
from placement.report.measured import LABELS
from placement.report.memory import TIERS
from placement.report.noun import LiveFigure, Report
from placement.report.numbers import human_bytes, percent, quantity, seconds
from placement.report.promises import PastEpoch
from placement.report.traffic import Traffic
from placement.report.words import RATIOS, figures_of, row_label

# Tables are whole up to here, and the top of what there is beyond.
MAX_ROWS, MAX_NAMED_RANKS, TOP_EXPERTS, TOP_PAIRS, MAX_LONG_ROWS = 256, 8, 8, 20, 60


@dataclass(frozen=True, slots=True)
class Table:
    """The first cell of a row is its header."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def scores(report: Report) -> Table:
    measured = report.measured
    rows = [
        [row_label(figure), *(_cell(score.get(figure)) for score in measured.scores.values())]
        for figure in figures_of(report)
    ]
    return Table("on held-out requests", ["", *(LABELS[name] for name in measured.scores)], rows)


def trust(report: Report) -> Table:
    rows = [
        [
            RATIOS.get(name, name.replace("_", " ")),
            f"{ratio.ratio:.3f}",
            percent(ratio.ratio - 1),
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            _cell(ratio.requests),
        ]
        for name, ratio in report.measured.trust.items()
    ]
    return Table(
        "how far the figures can be trusted: below 1 is fewer; an interval with 1 in it is chance",
        ["other nodes visited", "ratio", "change", "95% interval", "requests"],
        rows,
    )


def live(rows: Sequence[LiveFigure]) -> Table:
    cells = [
        [
            figure.name,
            "" if figure.before is None else quantity(figure.before, figure.unit),
            quantity(figure.after, figure.unit),
        ]
        for figure in rows
    ]
    return Table("counted by the ranks while they served", ["", "before", "after"], cells)


def placements(report: Report) -> list[tuple[str, Traffic]]:
    """The placements whose traffic is known, by their key in LABELS."""
    before, after = report.traffic_before, report.traffic_after
    return [("after", after)] if before is None else [("before", before), ("after", after)]


def levels(report: Report) -> Table:
    """Each level of links, before and after: what is sent in bytes, or in hidden states of unknown size."""
    tree, known, token_bytes = report.topology, placements(report), report.sizes.token_bytes
    head = ["level", "groups", "bandwidth", "latency", *(f"others visited, {LABELS[name]}" for name, _ in known)]
    if len(known) == 2:
        head.append("change")
    what = "sent out" if token_bytes is None else "bytes per token"
    head += [f"{what}, {LABELS[name]}" for name, _ in known]
    rows = []
    for level, (name, groups, link) in enumerate(zip(tree.levels, tree.groups, tree.links, strict=True)):
        visited = [traffic.visited(level) for _, traffic in known]
        row = [name, f"{int(groups[-1]) + 1:,}", f"{human_bytes(link.bandwidth)}/s", f"{link.latency_s * 1e6:g} us"]
        row += [f"{figure:.3f}" for figure in visited]
        if len(visited) == 2:
            row.append(percent(visited[1] / visited[0] - 1) if visited[0] else "")
        row += [
            f"{traffic.vectors[level]:.3f}"
            if token_bytes is None
            else human_bytes(traffic.bytes_per_token(level, token_bytes))
            for _, traffic in known
        ]
        rows.append(row)
    caption = (
        "links of one group to its siblings; visits and hidden states sent out are per token and layer, bytes per "
        "token, out and back, of all layers"
    )
    return Table(caption, head, rows)


def ranks(report: Report) -> Table:
    """Load, slots by tier and bytes of each rank; the busiest where they are very many."""
    known, memory, size = placements(report), report.memory, report.sizes.expert_bytes
    load = report.traffic_after.load
    chosen = np.sort(np.argsort(-load, kind="stable")[:MAX_ROWS]).tolist()
    head = ["rank", "node", *(f"load, {LABELS[name]}" for name, _ in known)]
    head += [*(TIERS[tier] for tier in memory.tiers), "empty slots", *(["weights"] if size else [])]
    nodes = report.topology.node_of_rank()
    rows = [
        [
            str(rank),
            str(nodes[rank]),
            *(f"{traffic.load[rank]:.3f}" for _, traffic in known),
            *(f"{memory.slots[rank, tier]:,}" for tier in memory.tiers),
            f"{memory.empty[rank]:,}",
            *([human_bytes(float(memory.filled[rank] * size))] if size else []),
        ]
        for rank in chosen
    ]
    few = "" if len(rows) == len(load) else f"; the busiest {len(rows)} of {len(load):,} ranks"
    caption = f"load: pairs of token and expert served, over the mean of the ranks; slots of all layers by tier{few}"
    return Table(caption, head, rows)


def experts(report: Report) -> Table:
    """The busiest experts of each layer, and where the busiest lies."""
    top = np.argsort(-report.load, axis=1, kind="stable")[:, :TOP_EXPERTS].tolist()
    rows = [
        [
            str(layer),
            f"{row[0]} on {name_ranks(report.holders[layer][row[0]])}",
            str(sum(len(holders) > 1 for holders in report.holders[layer])),
            *(f"{expert}: {report.load[layer, expert]:.2f}" for expert in row),
        ]
        for layer, row in enumerate(top)
    ]
    head = ["layer", "busiest on ranks", "with copies", *(f"no. {place + 1}" for place in range(len(top[0])))]
    return Table(f"the {len(top[0])} busiest experts of each layer, and their load over the layer's mean", head, rows)


def activation(found: Activation) -> Table:
    """For each kind and some layers, the experts whose share of tokens changes most from position to position."""
    rows = []
    for kind, name in enumerate(found.kinds):
        for index in evenly(len(found.layers), MAX_LONG_ROWS // len(found.kinds)):
            layer, share = found.layers[index], found.share[kind, index]
            known = share[~np.isnan(share).any(axis=1)]
            mean, swing = known.mean(axis=0), known.max(axis=0) - known.min(axis=0)
            busiest, moving = int(mean.argmax()), int(swing.argmax())
            rows.append(
                [
                    name,
                    str(layer),
                    f"{busiest}: {mean[busiest]:.1%}",
                    f"{moving}: {known[:, moving].min():.1%} to {known[:, moving].max():.1%}",
                ]
            )
    return Table(
        "share of the tokens that choose an expert",
        ["kind of request", "layer", "busiest expert", "changes most with position"],
        rows,
    )


def together(report: Report) -> Table:
    rows = [
        [str(one.layer), f"{first}, {second}", f"{share:.1%}"]
        for one in report.coactivation
        for first, second, share in one.strongest(_pairs_each(len(report.coactivation)))
    ]
    return Table("strongest pairs of each layer shown", ["layer", "experts", "tokens that use both"], rows)


def transitions(report: Report) -> Table:
    rows = [
        [f"{one.layer} to {one.other}", f"{first} to {second}", f"{share:.1%}"]
        for one in report.transitions
        for first, second, share in one.strongest(_pairs_each(len(report.transitions)))
    ]
    return Table("strongest steps of each pair of layers shown", ["layers", "experts", "tokens that use both"], rows)


def rounds(report: Report) -> Table:
    sized = all(step.num_bytes is not None for step in report.rounds)
    rows = [
        [str(number + 1), str(step.pairs), str(step.moves)]
        + ([] if step.num_bytes is None else [human_bytes(step.num_bytes)])
        + ([] if step.seconds is None else [seconds(step.seconds)])
        for number, step in enumerate(report.rounds[:MAX_ROWS])
    ]
    few = "" if len(rows) == len(report.rounds) else f", the first {len(rows)} of {len(report.rounds)}"
    return Table(
        f"rounds{few}; time on links that carry nothing else" if sized else f"rounds{few}",
        ["round", "pairs of ranks", "experts", *(["size", "time"] if sized else [])],
        rows,
    )


def cache(curve: CacheCurve) -> Table:
    rows = [
        [str(slots), f"{lru:.1%}", f"{best:.1%}", f"{lru / best:.0%}" if best else ""]
        for slots, lru, best in zip(curve.slots.tolist(), curve.lru.tolist(), curve.belady.tolist(), strict=True)
    ]
    return Table(
        "share of expert reads that find their weights on the GPU",
        ["GPU slots per layer and rank", "least recently used", "best possible (Belady)", "of the best"],
        rows,
    )


def past(epochs: Sequence[PastEpoch]) -> Table:
    rows = [
        [
            str(epoch.epoch),
            epoch.at[:19].replace("T", " "),
            epoch.state,
            _cell(epoch.before),
            _cell(epoch.promised),
            _cell(epoch.found_before),
            _cell(epoch.found),
            epoch.verdict if epoch.promised is not None else "",
            epoch.reason,
        ]
        for epoch in epochs
    ]
    return Table(
        "other nodes visited per token and layer: on held-out requests when planned; found: later, on the traffic then",
        ["epoch", "when (UTC)", "state", "before", "promised", "before, later", "found", "promise", "why"],
        rows,
    )


def name_ranks(ranks: tuple[int, ...]) -> str:
    """'0, 3, 5', and only the first of very many."""
    named = ", ".join(str(rank) for rank in ranks[:MAX_NAMED_RANKS])
    more = len(ranks) - MAX_NAMED_RANKS
    return f"{named} and {more} more" if more > 0 else named


def _pairs_each(maps: int) -> int:
    return max(2, min(TOP_PAIRS, MAX_LONG_ROWS // max(1, maps)))


def _cell(value: float | None) -> str:
    """A figure in a table; three decimals where it is not a whole number."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
