"""Commands on experts in host memory: cache, fit, doctor. They start without Ray."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli_offline import JsonOption, TraceArgument
from cluster.terminal import LOG, OUT, show_result, working

cache_commands = typer.Typer()


@cache_commands.command()
def cache(
    trace: TraceArgument,
    slots: Annotated[str, typer.Option(metavar="SHARES", help="GPU slots as shares of all experts.")] = "10%,25%,50%",
    batch: Annotated[str, typer.Option(metavar="SIZES", help="Streams of decode that run at once.")] = "1",
    as_json: JsonOption = False,
) -> None:
    """Score cache policies on a trace: hit rates, and what Belady's optimum would have hit on the same lookups.

    Fitted on the even requests, judged on the odd ones. No prefetch is counted.

    [dim]moetis cache trace/ --slots 10%,25%,50% --batch 1,8,32[/dim]
    """
    from rich.progress import track

    from cluster.cache import cache_table, numbers_of, shares_of
    from placement.cache.score import score_policies
    from placement.trace import load_trace

    shares, batches = shares_of(slots), numbers_of(batch, "--batch")
    with working("reading the trace"):
        routing = load_trace(trace)
    steps = score_policies(routing, shares=shares, batches=batches)
    total = len(shares) * len(batches)
    scores = list(track(steps, description="playing", total=total, console=LOG, transient=True))
    figures = {"fit": "even requests", "judged": "odd requests", "scores": [score.to_dict() for score in scores]}
    show_result(as_json, figures, lambda: OUT.print(cache_table(scores)))
