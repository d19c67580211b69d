"""What the demo found: a table, a dictionary, a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.config import HISTORY_FILE
from cluster.demo import DemoResult
from cluster.promises import past_epochs
from cluster.views import rebalance_to_dict
from placement.files import write_whole
from placement.report import LiveFigure, Sizes, make_report, render_html


def to_dict(result: DemoResult) -> dict[str, Any]:
    """Every figure of the run, for machines."""
    before, during, after = result.phases
    return {
        "ok": result.ok,
        "prompts": result.num_prompts,
        "texts": {
            "answers_checked": result.verdict.answers,
            "tokens_checked": result.verdict.tokens,
            "ties": result.verdict.ties,
            "wrong": [list(place) for place in result.verdict.wrong],
        },
        "served": {
            name: {
                "answers": len(phase.answers),
                "tokens": phase.num_tokens,
                "seconds": phase.seconds,
                "cache_hit_rate": phase.hit_rate,
                "recorder_s": phase.record_s,
            }
            for name, phase in (("before", before), ("during", during), ("after", after))
        },
        "held_out": {"before": result.before.to_dict(), "after": result.after.to_dict()},
        "rebalance": rebalance_to_dict(result.rebalance),
        "total_s": result.total_s,
    }


def print_result(result: DemoResult, page: Path, console: Console) -> None:
    before, during, after = result.phases
    score = result.before
    table = Table(title="what was served, before and after the experts moved", title_justify="left")
    for column, justify in (("", "left"), ("before", "right"), ("after", "right"), ("change", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for label, figure in (
        ("other nodes visited per token and layer", "nodes_visited"),
        ("other ranks visited per token and layer", "ranks_visited"),
        ("load max/mean over ranks", "load_max_over_mean"),
    ):
        old, new = getattr(result.before, figure), getattr(result.after, figure)
        table.add_row(label, f"{old:.3f}", f"{new:.3f}", f"{new / old - 1:+.0%}" if old else "")
    table.add_row(
        "cache hit rate", f"{before.hit_rate:.1%}", f"{after.hit_rate:.1%}", f"{after.hit_rate - before.hit_rate:+.1%}"
    )
    table.add_row("tokens per second", f"{_speed(before):.0f}", f"{_speed(after):.0f}", "")
    table.caption = (
        f"hops and load: {score.num_tokens} tokens of {score.num_requests} requests that the plan was not fitted on"
    )
    table.caption_justify = "left"
    console.print(table)
    moved, verdict = rebalance_to_dict(result.rebalance), result.verdict
    console.print(
        f"moved    {moved['moves']} experts, {moved['bytes'] / 1e6:.1f} MB, in {moved['rounds']} rounds: planned in "
        f"{moved['plan_s']:.1f} s, copied in {moved['copy_s']:.2f} s, switched in {moved['switch_s']:.2f} s, "
        f"while {len(during.answers)} answers were written ({_speed(during):.0f} tokens/s)"
    )
    console.print(
        f"texts    {verdict.answers} different answers to {result.num_prompts} prompts, before, during and after: "
        f"{verdict.tokens} tokens checked against the plain model, {len(verdict.wrong)} wrong, {verdict.ties} ties"
    )
    recorded, seconds = before.record_s + after.record_s, before.seconds + after.seconds
    ranks = result.rebalance.plan.placement.num_ranks
    console.print(f"recorder {recorded / (seconds * ranks):.2%} of the serving time")
    console.print(f"report   {page}", soft_wrap=True)


def why_not(result: DemoResult) -> str:
    """Why the demo did not show what it should."""
    if result.verdict.wrong:
        name, position = result.verdict.wrong[0]
        return f"{len(result.verdict.wrong)} texts differ from the plain model's, first {name} at token {position}"
    if result.rebalance.decision != "applied":
        return f"the plan was {result.rebalance.decision}: {result.rebalance.reason}"
    return (
        f"other nodes visited went from {result.before.nodes_visited:.3f} to {result.after.nodes_visited:.3f} "
        f"on held-out requests"
    )


def write_report(result: DemoResult, folder: Path) -> Path:
    """The HTML report, with what only a live run can measure."""
    before, during, after = result.phases
    live = (
        LiveFigure(name="cache hit rate", before=before.hit_rate, after=after.hit_rate, unit="%"),
        LiveFigure(name="tokens per second", before=_speed(before), after=_speed(after), unit="1/s"),
        LiveFigure(name="tokens per second while experts moved", before=None, after=_speed(during), unit="1/s"),
        LiveFigure(name="copying", before=None, after=result.rebalance.copy_s, unit="s"),
        LiveFigure(name="switching the epoch", before=None, after=result.rebalance.switch_s, unit="s"),
        LiveFigure(name="tokens equal to the plain model's", before=None, after=result.verdict.tokens, unit=""),
        LiveFigure(name="ties accepted", before=None, after=result.verdict.ties, unit=""),
    )
    moved = result.rebalance.migration
    report = make_report(
        result.rebalance.plan,
        result.held_out,
        before=result.rebalance.before.placement,
        live=live,
        migration=moved,
        sizes=Sizes(expert_bytes=None if moved is None else moved.expert_bytes),
        past=past_epochs(folder / HISTORY_FILE),
        title="Moetis demo",
    )
    path = folder / "report.html"
    write_whole(path, render_html(report).encode())
    return path


def _speed(phase: Any) -> float:
    return float(phase.num_tokens / phase.seconds)
