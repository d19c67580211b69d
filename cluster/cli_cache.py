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
    from cluster.sources import read_trace
    from placement.cache.score import score_policies

    shares, batches = shares_of(slots), numbers_of(batch, "--batch")
    routing = read_trace(trace)
    steps = score_policies(routing, shares=shares, batches=batches)
    total = len(shares) * len(batches)
    scores = list(track(steps, description="playing", total=total, console=LOG, transient=True))
    figures = {"fit": "even requests", "judged": "odd requests", "scores": [score.to_dict() for score in scores]}
    show_result(as_json, figures, lambda: OUT.print(cache_table(scores)))


@cache_commands.command()
def fit(
    model: Annotated[str, typer.Argument(metavar="MODEL_FOLDER", help="config.json and safetensors shards.")],
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="What may be used of one GPU; 24G is 24 GiB.")],
    context: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens a request; 64K is 65,536.")] = "8K",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    link_gbs: Annotated[float, typer.Option(min=0.1, help="Host to GPU, GB/s; `moetis doctor` measures it.")] = 55.0,
    hbm_gbs: Annotated[float, typer.Option(min=1, help="GPU memory, GB/s.")] = 3000.0,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model fits: what stays on the GPU, the KV cache, expert slots, host memory, bounds on speed.

    Reads the config and the shards' headers alone. Refuses, with the sum, what can't fit.

    [dim]moetis fit models/qwen3-30b --gpu-memory 24G --context 64K --batch 8[/dim]
    """
    from pathlib import Path

    from cluster.fit import amount_of, fit_table
    from placement.fit.checkpoint import read_checkpoint
    from placement.fit.sizing import FitRequest, fit_model

    request = FitRequest(
        gpu_bytes=amount_of(gpu_memory, "--gpu-memory"),
        context=amount_of(context, "--context"),
        batch=batch,
        link_bandwidth=link_gbs * 1e9,
        hbm_bandwidth=hbm_gbs * 1e9,
    )
    found = fit_model(read_checkpoint(Path(model)), request, Path(model))
    show_result(as_json, found.to_dict(), lambda: OUT.print(fit_table(found)))


@cache_commands.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check this machine: PCIe link, pinned and pageable copies, NUMA, locked and shared memory, driver, NCCL.

    [dim]moetis doctor --json[/dim]
    """
    from dataclasses import asdict

    from cluster.fit import doctor_table
    from workers.doctor import examine

    with working("measuring"):
        findings = examine()
    figures = {"findings": [asdict(finding) for finding in findings]}
    show_result(as_json, figures, lambda: OUT.print(doctor_table(findings)))
