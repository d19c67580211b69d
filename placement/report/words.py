"""What a report says in sentences besides its verdict."""

from __future__ import annotations

from placement.report.noun import Report

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


def evidence(report: Report) -> list[str]:
    """What the figures rest on, and what is not known."""
    said = []
    fit, held_out = report.measured.fit, report.measured.held_out
    if fit is not None and held_out is not None:
        said.append(
            f"Fitted on {fit.tokens:,} tokens of {fit.requests:,} requests; judged on "
            f"{held_out.tokens:,} tokens of {held_out.requests:,} other requests."
        )
    if report.measured.says and "after_over_before" not in report.measured.trust:
        said.append(f"The plan file says: {report.measured.says}")
    said.append(
        f"The charts of experts, ranks and topology show {report.num_tokens:,} tokens of {report.num_requests:,} "
        f"requests, top-{report.top_k}, recorded at a sampling rate of {report.sampling_rate:g}."
    )
    if not report.homes_recorded:
        said.append("The trace does not say on which rank a token's attention ran: homes are random.")
    if report.before_epoch is None:
        said.append("No present placement was given: nothing is said about what would have to move.")
    elif report.before_epoch >= report.plan.placement.epoch:
        said.append(
            f"The present placement has epoch {report.before_epoch}, the plan {report.plan.placement.epoch}: the plan "
            f"was not made from it, so no moves are listed."
        )
    return said
