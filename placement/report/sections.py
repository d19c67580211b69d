"""The sections of the page: a line that says how to look, the chart, the numbers behind it."""

from __future__ import annotations

from placement.report import figures, tables
from placement.report.activation import Activation
from placement.report.affinity import PairMap
from placement.report.cachecurve import CacheCurve
from placement.report.markup import chart, folded, look, table
from placement.report.measured import LABELS
from placement.report.noun import Report
from placement.report.promises import promises_in_words
from placement.report.tree import MAX_DRAWN_RANKS, draw_tree
from placement.report.words import cache_in_words, migration_in_words, shown_layers


def scores(report: Report) -> str:
    measured = report.measured
    if not measured.scores:
        return look("This plan carries no measured figures.")
    parts = [table(tables.scores(report))]
    if measured.trust:
        parts.append(table(tables.trust(report)))
    if any(figure in score for score in measured.scores.values() for figure in figures.VISITS):
        parts.append(
            look("Shorter is better: each visit carries a token's hidden state out and back. EPLB balances load alone.")
        )
        label = "bar chart: nodes and ranks visited under each placement"
        parts.append(chart("scores", figures.score_bars(report), label))
    return "".join(parts)


def live(report: Report) -> str:
    return table(tables.live(report.live))


def topology(report: Report) -> str:
    tree, known = report.topology, tables.placements(report)
    scale = max(float(arrived.max()) for _, traffic in known for arrived in traffic.arrivals)
    drawn = "".join(
        f"<figure><figcaption>{LABELS[name]}</figcaption>"
        f"{draw_tree(tree, traffic, figures.COLOURS[name], scale)}</figure>"
        for name, traffic in known
    )
    few = (
        ""
        if tree.num_ranks <= MAX_DRAWN_RANKS
        else f" The first {MAX_DRAWN_RANKS} of {tree.num_ranks:,} ranks are drawn."
    )
    hint = f"The thicker a way, the more visits come over it from tokens whose home is elsewhere.{few}"
    return look(hint) + drawn + table(tables.levels(report))


def ranks(report: Report) -> str:
    return (
        look(
            "Bars add up all layers, the dotted line is their mean. In one layer ranks differ more: load max/mean, "
            "above, is of each layer."
        )
        + chart("rank-load", figures.rank_load_bars(report), "bar chart: load of each rank over the mean")
        + look("What lies on each rank, by tier: a slot holds one expert of one layer.")
        + chart("rank-memory", figures.memory_bars(report), "stacked bars: expert slots of each rank by tier")
        + folded("load, tiers and memory of the ranks", tables.ranks(report))
    )


def expert_load(report: Report) -> str:
    drawn = figures.load_heat_map(report)
    return (
        look("Each row is a layer. Few bright cells in a row carry much of the layer, and copies of them pay.")
        + chart(
            "expert-load",
            drawn,
            "heat map: load of the experts of each layer",
            [("order", [variant["axes"]["xaxis"]["title"]["text"] for variant in drawn.variants])],
        )
        + folded("the busiest experts", tables.experts(report))
    )


def activation(found: Activation) -> str:
    hint = "Rows are positions in a request, columns experts. A column that fades or lights up: an expert of one phase."
    kinds = [f"{name} ({tokens:,} tokens)" for name, tokens in zip(found.kinds, found.tokens, strict=True)]
    if found.left_out:
        hint += f" The {len(found.kinds)} kinds with most tokens; {found.left_out} smaller ones are left out."
    return (
        look(hint)
        + chart(
            "activation",
            figures.activation_map(found),
            "heat map: position in the request by expert",
            [("kind of request", kinds), ("layer", [str(layer) for layer in found.layers])],
        )
        + folded("what changes with position", tables.activation(found))
    )


def together(report: Report) -> str:
    maps = report.coactivation
    shown = shown_layers([one.layer for one in maps], report.plan.placement.num_layers) + _few(maps, report)
    return (
        look(
            f"Experts stand in the order of their ranks: bright blocks on the diagonal mean that tokens stay "
            f"together. {shown}"
        )
        + chart(
            "together",
            figures.pair_map(maps, "expert", "expert"),
            "heat map: experts of a layer that tokens use together",
            [("layer", [str(one.layer) for one in maps])],
        )
        + folded("strongest pairs", tables.together(report))
    )


def transitions(report: Report) -> str:
    maps = report.transitions
    shown = shown_layers([one.layer for one in maps], report.plan.placement.num_layers - 1) + _few(maps, report)
    return (
        look(
            f"From a layer (rows) to the next (columns), both in the order of ranks: bright blocks on the diagonal "
            f"mean that the rank that sees a token often owns what it needs next. {shown}"
        )
        + chart(
            "transitions",
            figures.pair_map(maps, "from expert", "to expert"),
            "heat map: experts that tokens use one after another",
            [("layers", [f"{one.layer} to {one.other}" for one in maps])],
        )
        + folded("strongest steps", tables.transitions(report))
    )


def _few(maps: tuple[PairMap, ...], report: Report) -> str:
    shown, num_experts = len(maps[0].rows), report.plan.placement.num_experts
    return "" if shown == num_experts else f" The {shown} busiest of {num_experts:,} experts of a layer."


def migration(report: Report) -> str:
    return (
        look(migration_in_words(report))
        + chart("migration", figures.migration_bars(report), "bar chart: experts copied in each round")
        + folded("rounds", tables.rounds(report))
    )


def cache(curve: CacheCurve, rows: int) -> str:
    return (
        look(cache_in_words(curve, rows))
        + chart("cache", figures.cache_lines(curve), "lines: hit rate of the expert cache by its slots")
        + folded("hit rates", tables.cache(curve))
    )


def past(report: Report) -> str:
    return look(promises_in_words(report.past)) + table(tables.past(report.past))
