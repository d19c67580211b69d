"""The command line. Results go to stdout, progress and messages to stderr; exit 0 done, 1 failed, 2 bad input.

Each command imports what it needs when it runs, so that `moetis --help` and the offline commands start without Ray.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.terminal import LOG, OUT
from placement.errors import InputError, MoetisError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Place the experts of Mixture-of-Experts models on the GPUs of a cluster, and serve them from there.\n\n"
    "Start with [bold]moetis demo[/bold]: the whole loop on a small real model, in about a minute.",
)

TraceArgument = Annotated[str, typer.Argument(metavar="TRACE", help="A folder of trace segments, or an .npz file.")]
PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `moetis plan` writes it.")]
OutOption = Annotated[str, typer.Option("--out", metavar="FILE", help="Where to write the result.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
SeedOption = Annotated[int, typer.Option(help="The same input and seed give the same result.")]
ConfigOption = Annotated[str, typer.Option("--config", metavar="FILE", help="The cluster's YAML file.")]


class Baseline(StrEnum):
    EPLB = "eplb"
    LINEAR = "linear"
    RANDOM = "random"


class JudgedOn(StrEnum):
    HELD_OUT = "held-out"
    ALL = "all"


@app.command()
def plan(
    trace: TraceArgument,
    topology: Annotated[str, typer.Option(help="A topology file, or NODESxGPUS such as 4x2.")],
    slots_per_rank: Annotated[int, typer.Option(min=1, help="Expert slots per layer on each GPU.")],
    out: OutOption,
    current: Annotated[str | None, typer.Option(metavar="PLAN", help="The plan in force: little is moved.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Plan a placement from a routing trace: fitted on the even requests, judged on the odd ones.

    [dim]moetis plan trace/ --topology 4x2 --slots-per-rank 5 --out plan.json[/dim]
    """
    from cluster import offline, views
    from placement.plan import make_plan
    from placement.planfile import load_plan, plan_to_json
    from placement.topology import load_topology
    from placement.trace import load_trace

    path = offline.output_path(out)
    tree = load_topology(topology)
    present = load_plan(current) if current is not None else None
    offline.check_current(present, slots_per_rank, tree.num_ranks)
    with _working("reading the trace"):
        routing = load_trace(trace)
    with _working("planning"):
        made = make_plan(
            routing,
            tree,
            rows_per_rank=slots_per_rank,
            current=present.placement if present is not None else None,
            seed=seed,
        )
    offline.write_result(path, plan_to_json(made).encode())
    LOG.print(f"wrote {path}")
    _show(as_json, {"plan": str(path), **made.measured}, lambda: OUT.print(views.plan_table(made)))


@app.command()
def evaluate(
    plan: PlanArgument,
    trace: TraceArgument,
    baseline: Annotated[
        list[Baseline] | None, typer.Option(help="Also score this; can be given several times.")
    ] = None,
    on: Annotated[JudgedOn, typer.Option(help="Judge on the odd requests, or on all.")] = JudgedOn.HELD_OUT,
    homes: Annotated[
        str, typer.Option(help="'recorded' (random where unknown), 'random', or a file from `moetis homes`.")
    ] = "recorded",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Score a plan by replaying a trace through it, beside baselines at the same number of slots.

    [dim]moetis evaluate plan.json trace/ --baseline eplb --json[/dim]
    """
    from cluster import offline, views
    from placement.planfile import load_plan
    from placement.trace import load_trace

    made = load_plan(plan)
    with _working("reading the trace"):
        routing = load_trace(trace)
    with _working("replaying"):
        names = [str(name) for name in baseline or []]
        found = offline.compare(made, routing, names=names, on=str(on), homes=homes, seed=seed)
    _show(as_json, found.to_dict(), lambda: OUT.print(views.comparison_table(found)))


@app.command()
def homes(
    plan: PlanArgument,
    trace: TraceArgument,
    out: OutOption,
    prefix: Annotated[int, typer.Option(min=1, help="How many of a request's first tokens may be looked at.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Choose the home rank of each request from its first tokens alone; writes a .npy in ascending request order.

    [dim]moetis homes plan.json trace/ --prefix 64 --out homes.npy[/dim]
    """
    import numpy as np

    from cluster import offline
    from placement.planfile import load_plan
    from placement.trace import load_trace

    path = offline.output_path(out)
    made = load_plan(plan)
    with _working("reading the trace"):
        routing = load_trace(trace)
    requests, ranks, data = offline.homes_file(made, routing, prefix)
    offline.write_result(path, data)
    LOG.print(f"wrote {path}")
    counts = np.bincount(ranks, minlength=made.placement.num_ranks).tolist()
    result = {"homes": str(path), "requests": len(requests), "requests_per_rank": counts}
    _show(as_json, result, lambda: OUT.print(f"{len(requests)} requests; per rank: {counts}"))


@app.command()
def report(
    plan: PlanArgument,
    trace: TraceArgument,
    out: OutOption,
    current: Annotated[str | None, typer.Option(metavar="PLAN", help="The plan that it would replace.")] = None,
) -> None:
    """Write a self-contained HTML report on a plan: what it gains, what it moves, and on what evidence.

    [dim]moetis report plan.json trace/ --out report.html[/dim]
    """
    from placement.report import make_report, render_html

    from cluster import offline
    from placement.planfile import load_plan
    from placement.trace import load_trace

    path = offline.output_path(out)
    made = load_plan(plan)
    present = load_plan(current).placement if current is not None else None
    with _working("reading the trace"):
        routing = load_trace(trace)
    with _working("drawing"):
        page = render_html(make_report(made, routing, before=present))
    offline.write_result(path, page.encode())
    OUT.print(str(path), soft_wrap=True)


@app.command()
def demo(
    run_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Default: runs/demo-DATE here.")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help='JSON lines of {"kind", "prompt"}.')] = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="Use the first N prompts.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write for each prompt.")] = 40,
    as_json: JsonOption = False,
) -> None:
    """Run the whole loop on a small real model: serve, learn, re-place live, check every text, report.

    Needs no network and no GPU. Starts a Ray cluster of its own, which ends with it.
    """
    from cluster import demo_run, demo_view

    name = f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(run_dir) if run_dir is not None else Path("runs") / name
    config = demo_run.demo_config(folder)
    source = Path(prompts) if prompts is not None else demo_run.DEMO_PROMPTS
    result = demo_run.run_demo(config, source, num_prompts=num_prompts, max_new_tokens=max_new_tokens)
    page = demo_view.write_report(result, folder)
    figures = demo_view.to_dict(result) | {"report": str(page)}
    _show(as_json, figures, lambda: demo_view.print_result(result, page, OUT))
    if not result.ok:
        LOG.print(f"[bold red]the demo failed:[/bold red] {demo_view.why_not(result)}")
        raise typer.Exit(1)


@app.command()
def serve(config: ConfigOption) -> None:
    """Serve a model on a cluster: requests on stdin, answers on stdout, a JSON object a line each.

    In: {"id": "a", "prompt": "def main(", "max_new_tokens": 32, "stream": true}, or {"cancel": "a"}.
    Out: {"id", "text", "tokens"} as they come, then "end": "finished", "cancelled" or "failed" (with "error").
    Ends at the end of stdin, or with Ctrl-C. `moetis rebalance` with the same file re-places its experts meanwhile.

    [dim]echo '{"id": "a", "prompt": "def main("}' | moetis serve --config configs/clusters/demo.yaml[/dim]
    """
    from cluster.config import load_config
    from cluster.serve import run_serve

    run_serve(load_config(config), sys.stdin, sys.stdout)


@app.command()
def rebalance(config: ConfigOption, as_json: JsonOption = False) -> None:
    """Let a running cluster plan from its own traffic and move its experts, if that pays.

    [dim]moetis rebalance --config configs/clusters/demo.yaml[/dim]
    """
    from cluster import views
    from cluster.config import load_config
    from cluster.rebalance import run_rebalance

    with _working("rebalancing"):
        result = run_rebalance(load_config(config))
    _show(as_json, views.rebalance_to_dict(result), lambda: OUT.print(views.rebalance_table(result)))
    if result.decision == "aborted":
        raise MoetisError(f"the migration was aborted, the old epoch serves: {result.reason}")


def _show(as_json: bool, figures: dict[str, Any], show: Callable[[], None]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        show()


@contextmanager
def _working(what: str) -> Iterator[None]:
    with LOG.status(f"{what} ..."):
        yield


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry of the `moetis` command."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(standalone_mode=True)
    except InputError as error:
        LOG.print(f"moetis: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except MoetisError as error:
        LOG.print(f"moetis: failed: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        LOG.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of stdout left; nothing more can be said there, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
