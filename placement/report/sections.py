"""The sections of the page: a line that says how to look, the chart, the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placement.report import figures
from placement.report.markup import chart, folded, look, table
from placement.report.measured import LABELS
from placement.report.noun import LiveFigure, Report
from placement.report.numbers import human_bytes, percent, quantity
from placement.report.traffic import Traffic
from placement.report.tree import MAX_DRAWN_RANKS, draw_tree
from placement.report.words import RATIOS, figures_of, row_label

# Tables are whole up to here, and the top of what there is beyond.
MAX_EXPERTS_IN_FULL, MAX_ROWS = 64, 256
TOP_EXPERTS, TOP_PAIRS = 8, 20


def scores(report: Report) -> str:
    measured = report.measured
    if not measured.scores:
        return look("This plan carries no measured figures.")
    rows = [
        [row_label(figure), *(_cell(score.get(figure)) for score in measured.scores.values())]
        for figure in figures_of(report)
    ]
    parts = [table("on held-out requests", ["", *(LABELS[name] for name in measured.scores)], rows)]
    if measured.trust:
        head = ["other nodes visited", "ratio", "change", "95% interval", "requests"]
        ratios = [
            [
                RATIOS.get(name, name.replace("_", " ")),
                f"{trust.ratio:.3f}",
                percent(trust.ratio - 1),
                f"{trust.low:.3f} to {trust.high:.3f}",
                _cell(trust.requests),
            ]
            for name, trust in measured.trust.items()
        ]
        parts.append(
            table(
                "how far the figures can be trusted: below 1 is fewer; an interval with 1 in it is chance", head, ratios
            )
        )
    if any(figure in score for score in measured.scores.values() for figure in figures.VISITS):
        parts.append(
            look("Shorter is better: each visit carries a token's hidden state out and back. EPLB balances load alone.")
        )
        parts.append(chart(figures.score_bars(report), "bar chart: nodes and ranks visited under each placement"))
    return "".join(parts)


def live(rows: Sequence[LiveFigure]) -> str:
    cells = [
        [
            figure.name,
            "" if figure.before is None else quantity(figure.before, figure.unit),
            quantity(figure.after, figure.unit),
        ]
        for figure in rows
    ]
    return table("counted by the ranks while they served", ["", "before", "after"], cells)


def expert_load(report: Report) -> str:
    hint = look("Each row is a layer. A bright left edge: few experts carry much of the layer, and copies of them pay.")
    busiest = report.load.argmax(axis=1)
    rows = [
        [
            str(layer),
            str(expert),
            f"{report.load[layer, expert]:.2f}",
            figures.name_ranks(report.holders[layer][expert]),
            str(sum(len(ranks) > 1 for ranks in report.holders[layer])),
        ]
        for layer, expert in enumerate(busiest.tolist())
    ]
    head = ["layer", "busiest expert", "its load / mean", "on ranks", "experts with copies"]
    drawn = chart(figures.load_heat_map(report), "heat map: load of the experts of each layer, busiest first")
    return (
        hint
        + drawn
        + folded("busiest expert of each layer, as a table", table("busiest expert of each layer", head, rows))
        + _all_loads(report)
    )


def _all_loads(report: Report) -> str:
    num_experts = report.load.shape[1]
    if num_experts <= MAX_EXPERTS_IN_FULL:
        rows = [[str(layer), *(f"{load:.2f}" for load in row)] for layer, row in enumerate(report.load.tolist())]
        head = ["layer", *map(str, range(num_experts))]
        return folded("all loads, as a table", table("load over the layer's mean, by expert", head, rows, dense=True))
    order = np.argsort(-report.load, axis=1)[:, :TOP_EXPERTS].tolist()
    rows = [
        [str(layer), *(f"{expert}: {report.load[layer, expert]:.2f}" for expert in experts)]
        for layer, experts in enumerate(order)
    ]
    head = ["layer", *(f"no. {place + 1}" for place in range(TOP_EXPERTS))]
    name = f"the {TOP_EXPERTS} busiest experts of each layer"
    return folded(f"{name}, as a table", table(f"{name}: load over the layer's mean", head, rows, dense=True))


def rank_load(report: Report) -> str:
    before, after = report.traffic_before, report.traffic_after
    busiest = np.sort(np.argsort(-after.load, kind="stable")[:MAX_ROWS])
    rows = [
        [str(rank), *([] if before is None else [f"{before.load[rank]:.3f}"]), f"{after.load[rank]:.3f}"]
        for rank in busiest.tolist()
    ]
    few = "" if len(rows) == len(after.load) else f"; the busiest {len(rows)} of {len(after.load):,} ranks"
    caption = f"pairs of token and expert served, over the mean of the ranks{few}"
    head = ["rank", *([] if before is None else [LABELS["before"]]), LABELS["after"]]
    return (
        look(
            "Bars add up all layers, the dotted line is their mean. In one layer ranks differ more: load max/mean, "
            "above, is of each layer."
        )
        + chart(figures.rank_load_bars(report), "bar chart: load of each rank over the mean")
        + folded("load of the ranks, as a table", table(caption, head, rows))
    )


def together(report: Report) -> str:
    hint = "Experts stand in the order of their ranks: bright blocks on the diagonal mean that tokens stay together."
    return look(hint) + "".join(_one_layer(report, index) for index in range(len(report.coactivation)))


def _one_layer(report: Report, index: int) -> str:
    layer, order, share = report.coactivation[index]
    one, other = np.tril_indices(len(order), -1)
    strongest = np.argsort(-share[one, other], kind="stable")[:TOP_PAIRS]
    rows = [
        [f"{order[one[pair]]}, {order[other[pair]]}", f"{share[one[pair], other[pair]]:.1%}"]
        for pair in strongest.tolist()
    ]
    name = f"layer {layer}"
    parts = [
        chart(figures.coactivation_map(report, index), f"heat map: experts of {name} that tokens use together"),
        folded(
            f"strongest pairs of {name}, as a table",
            table(f"strongest pairs of {name}", ["experts", "tokens that use both"], rows),
        ),
    ]
    if len(order) <= MAX_EXPERTS_IN_FULL:
        names = [str(expert) for expert in order.tolist()]
        cells = [
            [expert, *(f"{value:.2f}" for value in row)]
            for expert, row in zip(names, (100 * share).tolist(), strict=True)
        ]
        caption = f"% of tokens that use both experts, {name}, experts by rank"
        parts.append(folded(f"all pairs of {name}, as a table", table(caption, ["expert", *names], cells, dense=True)))
    return folded(name, "".join(parts), is_open=index == 0)


def topology(report: Report) -> str:
    tree, before, after = report.topology, report.traffic_before, report.traffic_after
    known: list[tuple[str, Traffic]] = [("after", after)] if before is None else [("before", before), ("after", after)]
    scale = max(float(arrived.max()) for _, traffic in known for arrived in traffic.arrivals)
    drawn = "".join(
        f"<figure><figcaption>{LABELS[name]}</figcaption>"
        f"{draw_tree(tree, traffic, figures.COLOURS[name], scale)}</figure>"
        for name, traffic in known
    )
    head = [
        "level",
        "groups",
        "bandwidth",
        "latency",
        *(f"others visited, {LABELS[name]}" for name, _ in known),
    ]
    rows = [
        [
            name,
            f"{int(groups[-1]) + 1:,}",
            f"{human_bytes(link.bandwidth)}/s",
            f"{link.latency_s * 1e6:g} us",
            *(f"{traffic.visited(level):.3f}" for _, traffic in known),
        ]
        for level, (name, groups, link) in enumerate(zip(tree.levels, tree.groups, tree.links, strict=True))
    ]
    few = (
        ""
        if tree.num_ranks <= MAX_DRAWN_RANKS
        else f" The first {MAX_DRAWN_RANKS} of {tree.num_ranks:,} ranks are drawn."
    )
    hint = look(f"The thicker a way, the more visits come over it from tokens whose home is elsewhere.{few}")
    return (
        hint
        + drawn
        + table(
            "links of one group to its siblings; visits per token and layer, on all tokens of this trace", head, rows
        )
    )


def migration(report: Report) -> str:
    moves, total = sum(step.moves for step in report.rounds), sum(step.num_bytes for step in report.rounds)
    slots = int((report.plan.placement.physical_to_logical >= 0).sum())
    is_sized = total > moves
    size = f", {human_bytes(total)}" if is_sized else ""
    hint = look(
        f"{moves:,} of {slots:,} experts are copied{size}, in {len(report.rounds)} rounds; in a round no rank has "
        f"more than one peer. The old placement serves until all is copied and checked."
    )
    rows = [
        [str(number + 1), str(step.pairs), str(step.moves), *([human_bytes(step.num_bytes)] if is_sized else [])]
        for number, step in enumerate(report.rounds)
    ]
    head = ["round", "pairs of ranks", "experts", *(["size"] if is_sized else [])]
    drawn = chart(figures.migration_bars(report), "bar chart: experts copied in each round")
    return hint + drawn + folded("rounds, as a table", table("rounds", head, rows))


def _cell(value: float | None) -> str:
    """A figure in a table; three decimals where it is not a whole number."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
