"""The commands that need no cluster: plan, slots, evaluate, homes. They start without Ray and without torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cluster.terminal import LOG, OUT, show_result, working

offline_commands = typer.Typer()

TraceArgument = Annotated[
    str, typer.Argument(metavar="TRACE", help="A trace folder, an .npz, or what an engine recorded (see `import`).")
]
CountsArgument = Annotated[
    str,
    typer.Argument(metavar="TRACE", help="A trace folder, an .npz, what an engine recorded (see `import`), or counts."),
]
CountsKeyOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Read the file as counts: its array NAME [layers, experts] (else 'counts')."),
]
ExpertsOption = Annotated[
    int | None, typer.Option("--experts", metavar="N", min=1, help="Experts of a layer, where the trace lacks it.")
]
PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `moetis plan` writes it.")]
TopologyOption = Annotated[str, typer.Option(help="A topology file, or NODESxGPUS such as 4x2.")]
OutOption = Annotated[str, typer.Option("--out", metavar="FILE", help="Where to write the result.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Sizes for step times: a known model, or a config.json. Else recognised by its shape."
    ),
]
DecodeBatchOption = Annotated[int, typer.Option(min=1, help="Tokens of all ranks together in a decode step.")]
PrefillBatchOption = Annotated[int, typer.Option(min=1, help="Tokens of all ranks together in a prefill step.")]
OverlapOption = Annotated[bool, typer.Option("--overlap", help="Computing hides behind exchanging (two batches).")]
SeedOption = Annotated[int, typer.Option(min=0, help="The same input and seed give the same result.")]


class Baseline(StrEnum):
    EPLB = "eplb"
    LINEAR = "linear"
    RANDOM = "random"


class JudgedOn(StrEnum):
    HELD_OUT = "held-out"
    ALL = "all"


@offline_commands.command()
def plan(
    trace: CountsArgument,
    topology: TopologyOption,
    slots_per_rank: Annotated[
        str, typer.Option(metavar="N", help="Expert slots per layer on each GPU: a number, or one a GPU as 9,9,6,6.")
    ],
    out: OutOption,
    current: Annotated[str | None, typer.Option(metavar="PLAN", help="The plan in force: little is moved.")] = None,
    keep_groups: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep each of N expert groups (grouped routing) whole on a node.")
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Trade hops against balance for speed: a known model, or a config.json."),
    ] = None,
    decode_batch: DecodeBatchOption = 512,
    prefill_batch: PrefillBatchOption = 8192,
    counts_key: CountsKeyOption = None,
    experts: ExpertsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Plan a placement from a routing trace: fitted on the even requests, judged on the odd ones.

    With --model, drafts between fewest hops and best balance are priced by the cost model on this topology, and the
    fastest is taken; with --current too, a gate says whether an hour of steps pays for the moves.
    From counts alone, load is levelled and copies are spread over nodes; nothing is known of nodes visited then.

    [dim]moetis plan trace/ --topology 4x2 --slots-per-rank 5 --out plan.json[/dim]
    """
    from cluster import offline, views
    from cluster.sources import read_source
    from placement.counts import Counts, plan_counts
    from placement.interchange.pieces import Hints
    from placement.modelsizes import named_sizes
    from placement.plan import make_plan
    from placement.planfile import load_plan, plan_to_json
    from placement.topology import load_topology
    from placement.tradeoff import Load, make_fastest_plan

    path = offline.output_path(out)
    tree = load_topology(topology)
    present = load_plan(current) if current is not None else None
    rows = offline.rows_of(slots_per_rank)
    offline.check_current(present, rows, tree.num_ranks)
    before = present.placement if present is not None else None
    sizes = None if model is None else named_sizes(model).sizes
    routing = read_source(trace, Hints(counts_key=counts_key, num_experts=experts, num_ranks=tree.num_ranks))
    with working("planning"):
        if isinstance(routing, Counts):
            even = offline.for_counts(rows, keep_groups=keep_groups, model=model)
            made = plan_counts(routing, tree, rows_per_rank=even, current=before)
        elif sizes is None:
            made = make_plan(routing, tree, rows_per_rank=rows, current=before, seed=seed, keep_groups=keep_groups)
        else:
            load = Load(sizes=sizes, batches=(decode_batch, prefill_batch))
            made = make_fastest_plan(
                routing, tree, load, rows_per_rank=rows, current=before, seed=seed, keep_groups=keep_groups
            )
    made = offline.with_layers(made, routing.model_layers if isinstance(routing, Counts) else routing.layers)
    table = views.counts_plan_table(made) if isinstance(routing, Counts) else views.plan_table(made)
    offline.write_result(path, plan_to_json(made).encode())
    LOG.print(f"wrote {path}")
    show_result(as_json, {"plan": str(path), **made.measured}, lambda: OUT.print(table))


@offline_commands.command()
def slots(
    trace: TraceArgument,
    topology: TopologyOption,
    first: Annotated[float, typer.Option("--from", metavar="TIMES", help="Slots as a multiple of the experts.")] = 1.0,
    last: Annotated[float, typer.Option("--to", metavar="TIMES", help="The same, where the curve ends.")] = 2.0,
    points: Annotated[int, typer.Option(min=2, help="Plans to make at most, evenly spread.")] = 9,
    goal: Annotated[str | None, typer.Option(metavar="PERCENT", help="Visits to save, such as 30%.")] = None,
    experts: ExpertsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Draw how much traffic more slots save, and find the fewest slots for a goal.

    Each point is a plan of its own, made with less effort than `moetis plan` takes and judged on held-out requests.

    [dim]moetis slots trace/ --topology 4x2 --from 1.0 --to 2.0 --goal 30%[/dim]
    """
    from rich.progress import track

    from cluster import offline, views
    from cluster.sources import read_trace
    from placement.curve import rows_between, slots_curve
    from placement.interchange.pieces import Hints
    from placement.topology import load_topology

    share = offline.share_of(goal, "--goal") if goal is not None else None
    tree = load_topology(topology)
    routing = read_trace(trace, Hints(num_experts=experts, num_ranks=tree.num_ranks))
    rows = rows_between(tree, routing.num_experts, first, last, points)
    steps = slots_curve(routing, tree, rows, seed=seed)
    curve = list(track(steps, description="planning", total=len(rows), console=LOG, transient=True))
    found = offline.slots_result(curve, routing.num_experts, share)
    show_result(as_json, found, lambda: OUT.print(views.slots_table(found)))


@offline_commands.command()
def evaluate(
    plan: PlanArgument,
    trace: CountsArgument,
    baseline: Annotated[
        list[Baseline] | None, typer.Option(help="Also score this; can be given several times.")
    ] = None,
    current: Annotated[str | None, typer.Option(metavar="PLAN", help="The plan in force: also scored.")] = None,
    other: Annotated[
        list[str] | None, typer.Option("--with", metavar="PLAN", help="Another plan; can be given several times.")
    ] = None,
    on: Annotated[
        JudgedOn | None, typer.Option(help="Judge on the odd requests (unless given), or on all.", show_default=False)
    ] = None,
    homes: Annotated[
        str | None,
        typer.Option(
            help="'recorded' (unless given; random where unknown), 'random', or a file from `moetis homes`.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    decode_batch: DecodeBatchOption = 512,
    prefill_batch: PrefillBatchOption = 8192,
    gpu_share: Annotated[float, typer.Option(help="Share of a rank's experts on its GPU; others are cached.")] = 1.0,
    overlap: OverlapOption = False,
    counts_key: CountsKeyOption = None,
    fit: Annotated[
        str | None, typer.Option(metavar="COUNTS", help="Counts alone: fit the baselines on these, not on the judged.")
    ] = None,
    fit_key: Annotated[str | None, typer.Option(metavar="NAME", help="Its array, as --counts-key.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Score a plan by replaying a trace through it, beside other plans, and baselines at the same number of slots.

    Visits, load, bytes and modelled step times, prefill and decode apart, with 95% intervals over requests.
    Counts alone give the load max/mean only.

    [dim]moetis evaluate plan.json trace/ --current old.json --baseline eplb --baseline linear[/dim]
    """
    from cluster import offline, views
    from cluster.comparison import compare, other_plans
    from cluster.comparison_view import comparison_table
    from cluster.sources import hints_of, read_source
    from placement.comparing import Serving
    from placement.counts import Counts
    from placement.interchange.pieces import Hints
    from placement.modelsizes import choose_sizes
    from placement.planfile import load_plan

    made = load_plan(plan)
    names = [str(name) for name in baseline or []]
    routing = read_source(trace, hints_of(made, counts_key))
    if isinstance(routing, Counts):
        offline.refuse_with_counts(on=on, homes=homes, current=current, model=model)
        fitted = None if fit is None else read_source(fit, Hints(counts_key=fit_key))
        levels = offline.compare_counts(made, routing, names=names, seed=seed, fit=fitted)
        show_result(as_json, levels, lambda: OUT.print(views.counts_table(levels)))
        return
    offline.refuse_with_tokens(fit=fit)
    named = choose_sizes(model, routing)
    serving = Serving(
        sizes=named.sizes,
        decode_batch=decode_batch,
        prefill_batch=prefill_batch,
        gpu_share=gpu_share,
        overlap=overlap,
        seed=seed,
    )
    with working("replaying"):
        found = compare(
            made,
            routing,
            others=other_plans(current, other or []),
            baselines=names,
            on=str(on or JudgedOn.HELD_OUT),
            homes=homes or "recorded",
            serving=serving,
            sizes=named.origin,
        )
    show_result(as_json, found.to_dict(), lambda: OUT.print(comparison_table(found)))


@offline_commands.command()
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
    from cluster.sources import hints_of, read_trace
    from placement.planfile import load_plan

    path = offline.output_path(out)
    made = load_plan(plan)
    routing = read_trace(trace, hints_of(made))
    requests, ranks, data = offline.homes_file(made, routing, prefix)
    offline.write_result(path, data)
    LOG.print(f"wrote {path}")
    counts = np.bincount(ranks, minlength=made.placement.num_ranks).tolist()
    result = {"homes": str(path), "requests": len(requests), "requests_per_rank": counts}
    show_result(as_json, result, lambda: OUT.print(f"{len(requests)} requests; per rank: {counts}"))
