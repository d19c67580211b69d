"""What a report says in sentences."""

from __future__ import annotations

from placement.report.noun import Report

LABELS = {
    "before": "before",
    "eplb": "EPLB",
    "after": "plan",
    "after_routed_homes": "plan, routed homes",
}
ROWS = (
    ("nodes_visited", "other nodes visited per token and layer"),
    ("ranks_visited", "other ranks visited per token and layer"),
    ("load_max_over_mean", "load max/mean over ranks"),
    ("node_load_max_over_mean", "load max/mean over nodes"),
    ("step_load_max_over_mean", "load max/mean over ranks, per step"),
)


def verdict(report: Report) -> str:
    """One sentence: what to do, and the number that says so."""
    gain = report.gain
    if gain is None:
        return "No verdict: this plan carries no figures from held-out requests."
    after, before = report.scores["after"], report.scores["before"]
    what = (
        f"{before['nodes_visited']:.2f} to {after['nodes_visited']:.2f} other nodes per token and layer "
        f"({-gain:+.0%}), load max/mean {before['load_max_over_mean']:.2f} to {after['load_max_over_mean']:.2f}"
    )
    if gain <= 0:
        return f"Leave it: on requests that the plan has not seen it saves no hops: {what}."
    return f"Apply: on requests that the plan has not seen, {what}."


def evidence(report: Report) -> list[str]:
    """What the figures rest on, and what is not known."""
    said = []
    measured = report.plan.measured
    if "fit" in measured:
        fit, held_out = measured["fit"], measured["held_out"]
        said.append(
            f"Fitted on {fit['tokens']:,} tokens of {fit['requests']:,} requests; judged on "
            f"{held_out['tokens']:,} tokens of {held_out['requests']:,} other requests."
        )
    said.append(
        f"The charts show {report.num_tokens:,} tokens of {report.num_requests:,} requests, top-{report.top_k}, "
        f"recorded at a sampling rate of {report.sampling_rate:g}."
    )
    if not report.homes_recorded:
        said.append("The trace does not say on which rank a token's attention ran: homes are random.")
    if report.plan.placement.epoch == 0 and not report.rounds:
        said.append("No present placement was given: nothing is said about what would have to move.")
    return said
