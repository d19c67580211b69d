"""What a report says in sentences besides its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from placement.report.cachecurve import CacheCurve
from placement.report.noun import Report
from placement.report.numbers import human_bytes, number_ranges, seconds

ROWS = {
    "nodes_visited": "other nodes visited per token and layer",
    "ranks_visited": "other ranks visited per token and layer",
    "load_max_over_mean": "load max/mean over ranks",
    "node_load_max_over_mean": "load max/mean over nodes",
    "step_load_max_over_mean": "load max/mean over ranks, per step",
}
RATIOS = {
    "after_over_before": "plan over before",
    "after_over_eplb": "plan over EPLB",
    "after_routed_homes_over_before": "plan with routed homes over before",
}
# Every score stands on the held-out tokens, which the evidence names once.
NOT_FIGURES = ("num_tokens", "num_requests")


def row_label(figure: str) -> str:
    """A known figure by its name in words, another by its own name: `p99_s` is 'p99 (s)'."""
    unit = " (s)" if figure.endswith("_s") else ""
    return ROWS.get(figure, figure.removesuffix("_s").replace("_", " ") + unit)


def figures_of(report: Report) -> list[str]:
    """The figures that any placement was scored by, the known ones first."""
    found = dict.fromkeys(figure for score in report.measured.scores.values() for figure in score)
    known = [figure for figure in ROWS if figure in found]
    return known + [figure for figure in found if figure not in ROWS and figure not in NOT_FIGURES]


def about(report: Report) -> str:
    """Which model, which cluster."""
    placement, topology = report.plan.placement, report.topology
    return (
        f"Model {report.model or 'of the trace'}: {placement.num_layers} MoE layers x {placement.num_experts} experts. "
        f"{placement.num_ranks:,} ranks in {topology.num_nodes:,} nodes ({topology.name}), {placement.rows_per_rank} "
        f"slots per layer on each; epoch {placement.epoch}."
    )


def evidence(report: Report) -> list[str]:
    """What the figures rest on, what was sampled, and what is not known."""
    said = []
    fit, held_out = report.measured.fit, report.measured.held_out
    if fit is not None and held_out is not None:
        said.append(
            f"Fitted on {fit.tokens:,} tokens of {fit.requests:,} requests; judged on "
            f"{held_out.tokens:,} tokens of {held_out.requests:,} other requests."
        )
    if report.measured.says and "after_over_before" not in report.measured.trust:
        said.append(f"The plan file says: {report.measured.says}")
    said.append(_shown(report))
    if not report.homes_recorded and report.counted is None:
        said.append("The trace does not say on which rank a token's attention ran: homes are random.")
    if report.sizes.origin:
        said.append(f"Bytes and times: {report.sizes.origin}.")
    if report.before_epoch is None:
        said.append("No present placement was given: nothing is said about what would have to move.")
    elif report.before_epoch >= report.plan.placement.epoch:
        said.append(
            f"The present placement has epoch {report.before_epoch}, the plan {report.plan.placement.epoch}: the plan "
            f"was not made from it, so no moves are listed."
        )
    return said


def _shown(report: Report) -> str:
    charts = "The charts of experts, ranks and topology show"
    if report.counted is not None:
        return f"The charts of experts and ranks show {report.counted}."
    every = -(-report.num_tokens // report.sampled_tokens)
    tokens = (
        f"{report.num_tokens:,} tokens"
        if every == 1
        else f"every {_ordinal(every)} of {report.num_tokens:,} tokens ({report.sampled_tokens:,})"
    )
    return (
        f"{charts} {tokens} of {report.num_requests:,} requests, top-{report.top_k}, recorded at a sampling rate of "
        f"{report.sampling_rate:g}."
    )


def migration_in_words(report: Report) -> str:
    moves = sum(step.moves for step in report.rounds)
    slots = int((report.plan.placement.physical_to_logical >= 0).sum())
    return (
        f"{moves:,} of {slots:,} experts are copied{copies_cost(report)}, in {len(report.rounds)} rounds; in a round "
        f"no rank has more than one peer. The old placement serves until all is copied and checked."
    )


def copies_cost(report: Report) -> str:
    """', 34.5 MB in 1.2 s', as far as the size of an expert is known."""
    sizes = [step.num_bytes for step in report.rounds if step.num_bytes is not None]
    times = [step.seconds for step in report.rounds if step.seconds is not None]
    return f", {human_bytes(sum(sizes))} in {seconds(sum(times))} on idle links" if sizes else ""


def cache_in_words(curve: CacheCurve, rows: int) -> str:
    """rows: slots per layer on each rank."""
    if curve.streams is None:
        steps = f"the first {curve.num_steps:,} recorded steps"
    else:
        steps = f"{curve.num_steps:,} steps of up to {curve.streams} requests side by side"
    return (
        f"If a rank's GPU has slots for some of its {rows} experts of a layer: how many reads find theirs there, under "
        f"the rule that drops the least recently used, and at best (Belady's rule knows the future). From "
        f"{curve.num_reads:,} reads in {steps}, {curve.layers} layers on {curve.ranks} ranks."
    )


def shown_layers(layers: Sequence[int], of: int) -> str:
    """Says which layers are shown where it is not all."""
    return "" if len(layers) == of else f"{len(layers)} of {of} layers are shown: {number_ranges(layers)}."


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
