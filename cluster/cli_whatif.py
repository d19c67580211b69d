"""What-if commands that need no cluster: simulate, screen. They start without Ray and without torch."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli_offline import (
    DecodeBatchOption,
    JsonOption,
    ModelOption,
    OverlapOption,
    PrefillBatchOption,
    SeedOption,
    TopologyOption,
    TraceArgument,
)
from cluster.terminal import LOG, OUT, show_result, working

whatif_commands = typer.Typer()

TopologiesOption = Annotated[
    list[str], typer.Option("--topology", help="A topology file, or 4x8 and the like; can be given several times.")
]


@whatif_commands.command()
def simulate(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="One trace a model: a folder, or an .npz.")],
    topology: TopologiesOption,
    slots: Annotated[str, typer.Option(metavar="LIST", help="Slots as multiples of the experts.")] = "1.0,1.5,2.0",
    planner: Annotated[
        str, typer.Option(metavar="LIST", help="Of moetis, moetis-routed, eplb, linear.")
    ] = "moetis,eplb",
    decode_batch: Annotated[str, typer.Option(metavar="LIST", help="Tokens of each GPU in a decode step.")] = "64",
    prefill_batch: Annotated[str, typer.Option(metavar="LIST", help="Tokens of each GPU in a prefill step.")] = "1024",
    nic: Annotated[str | None, typer.Option(metavar="LIST", help="GB/s between nodes; else the topology's.")] = None,
    gpu_share: Annotated[str, typer.Option(metavar="LIST", help="Shares of its experts a GPU has room for.")] = "1",
    group_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share one set of experts; else whole nodes, at most 320 GPUs.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Sizes, one a trace: a known model or a config.json."),
    ] = None,
    shares: Annotated[str | None, typer.Option(metavar="LIST", help="Each model's share of the tokens.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers to look at, at most.")] = 16,
    drift: Annotated[int, typer.Option(min=0, help="Also cut the trace into so many windows of time.")] = 0,
    every: Annotated[str, typer.Option(metavar="LIST", help="With --drift: plan every N windows; 0 once.")] = "0,1,2",
    by_workload: Annotated[bool, typer.Option("--by-workload", help="With --drift: workload after workload.")] = False,
    effort: Annotated[float, typer.Option(min=0, max=1, help="How hard to plan; `moetis plan` takes 1.")] = 0.3,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write an HTML page with charts.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Replay traces over clusters that do not exist yet, up to 10,000 GPUs: traffic, load, memory and step times.

    Every combination of topology, slots, planner, batch, link and GPU share is planned on one part of the requests and
    judged on the other. Large clusters are cut into equal groups of GPUs, each of which has all experts.

    [dim]moetis simulate trace/ --topology 4x8 --topology 1250x8 --slots 1.0,1.5 --nic 3,45 --drift 8[/dim]
    """
    from rich.progress import Progress

    from cluster import offline, simulation
    from cluster.sources import read_trace
    from placement.modelsizes import choose_sizes
    from placement.sweep import Grid
    from placement.topology import load_topology
    from placement.windows import cut_windows

    path = offline.output_path(out) if out is not None else None
    grid = Grid(
        times=simulation.numbers(slots, "--slots"),
        planners=tuple(planner.split(",")),
        decode_batches=simulation.whole_numbers(decode_batch, "--decode-batch"),
        prefill_batches=simulation.whole_numbers(prefill_batch, "--prefill-batch"),
        nics=simulation.numbers(nic, "--nic") if nic is not None else (),
        gpu_shares=simulation.numbers(gpu_share, "--gpu-share"),
        effort=effort,
        seed=seed,
    )
    intervals = simulation.whole_numbers(every, "--every")
    trees = [load_topology(text) for text in topology]
    names = simulation.names_of(traces)
    wanted = simulation.one_for_each(model, traces)
    models = []
    for name, text, size in zip(names, traces, wanted, strict=True):
        routing = read_trace(text)
        sizes = choose_sizes(size, routing)
        models.append(simulation.make_model(name, routing, sizes.sizes, sizes.origin, layers))
    weights = simulation.token_shares(shares, models)
    windows = cut_windows(models[0].trace, drift, by_workload=by_workload) if drift else []
    scales = simulation.scales_of(trees, models, group_gpus)
    drifted = []
    with Progress(console=LOG, transient=True) as progress:
        plans = simulation.num_plans(scales, models, grid)
        task = progress.add_task("simulating", total=plans)
        found = simulation.simulate(models, scales, grid, lambda: progress.advance(task))
        if drift:
            first = next(iter(scales.values()))
            policies = progress.add_task("drifting", total=len(intervals) + 2)
            drifted = simulation.simulate_drift(
                models[0],
                first,
                windows=windows,
                intervals=intervals,
                times=grid.times[0],
                grid=grid,
                advance=lambda: progress.advance(policies),
            )
    said = simulation.approximations(models, scales, grid)
    from cluster import simulation_view as view

    shared = simulation.shared_by_models(found, weights)
    if path is not None:
        offline.write_result(path, view.chart_page(found, drifted, said).encode())
        LOG.print(f"wrote {path}")
    figures = view.to_dict(models, found, shared, drifted, said)
    show_result(as_json, figures, lambda: view.print_all(OUT, found, shared, drifted, said))


@whatif_commands.command()
def screen(
    trace: TraceArgument,
    topology: TopologyOption,
    model: ModelOption = None,
    decode_batch: DecodeBatchOption = 512,
    prefill_batch: PrefillBatchOption = 8192,
    overlap: OverlapOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Is it worth it for you at all? An answer with its reasons, from a small trace, in under a minute.

    Plans quickly on a sample of tokens and layers, with and without spare slots; compares modelled steps with EPLB's.

    [dim]moetis screen trace/ --topology 4x8 --model deepseek-v3[/dim]
    """
    from cluster import screening_view as view
    from cluster.sources import read_trace
    from placement.comparing import Serving
    from placement.modelsizes import choose_sizes
    from placement.screening import screen as run_screening
    from placement.topology import load_topology

    tree = load_topology(topology)
    routing = read_trace(trace)
    named = choose_sizes(model, routing)
    serving = Serving(
        sizes=named.sizes, decode_batch=decode_batch, prefill_batch=prefill_batch, overlap=overlap, seed=seed
    )
    with working("planning and replaying"):
        found = run_screening(routing, tree, serving)
    figures = found.to_dict() | {"sizes": named.origin}
    show_result(as_json, figures, lambda: view.print_screening(OUT, found, named.origin))
