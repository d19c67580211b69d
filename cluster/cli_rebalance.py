"""`moetis rebalance` and `moetis history`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli_offline import JsonOption
from cluster.terminal import LOG, OUT, show_result, working
from placement.errors import ConfigError, MoetisError

if TYPE_CHECKING:
    from cluster.rebalance import RoundResult

rebalance_commands = typer.Typer()

ConfigOption = Annotated[str, typer.Option("--config", metavar="FILE", help="The cluster's YAML file.")]


@rebalance_commands.command()
def rebalance(
    config: ConfigOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")] = False,
    every: Annotated[
        str | None, typer.Option(metavar="TIME", help="Again and again, so far apart: 90s, 10m, 6h, 1d.")
    ] = None,
    drift: Annotated[
        bool, typer.Option("--drift", help="Plan only if traffic has drifted since the last decision.")
    ] = False,
    level: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="COPIES",
            help="Keep the placement; draw shares anew, and copy at most so many experts, for the load of now.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="With --every: end after so many rounds.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a running cluster plan from its own traffic and move its experts, if that pays.

    With --every it stays and sleeps between rounds, as a Ray job does; a round that fails is told, and five in a row
    end it. With --json each round is one line. Two jobs go well together: plans by drift, and in between --level,
    which plans in a moment and moves little.

    [dim]moetis rebalance --config configs/clusters/demo.yaml --dry-run[/dim]
    [dim]moetis rebalance --config configs/clusters/demo.yaml --drift --every 1m[/dim]
    [dim]moetis rebalance --config configs/clusters/demo.yaml --level 20 --every 1m[/dim]
    """
    from cluster.durations import seconds_of

    if rounds is not None and every is None:
        raise ConfigError("--rounds says how often --every repeats; give --every too")
    every_s = None if every is None else seconds_of(every, "--every")

    from cluster.config import load_config
    from cluster.rebalance import run_rebalance, run_rounds

    cluster = load_config(config)

    def one_round() -> None:
        with working("looking for drift" if drift else "rebalancing"):
            done = run_rebalance(cluster, by_drift=drift, dry_run=dry_run, most_copies=level)
        _show(done, as_json)

    if every_s is None:
        one_round()
        return
    run_rounds(
        one_round,
        every_s=every_s,
        rounds=rounds,
        failed=lambda error: LOG.print(f"this round failed: {error}", markup=False, soft_wrap=True),
    )


def _show(done: RoundResult, as_json: bool) -> None:
    from cluster import views

    result = done.result
    figures: dict[str, Any] = {"decision": "no drift"} if result is None else views.rebalance_to_dict(result)
    if done.check is not None:
        figures["drift"] = done.check.to_dict()
        LOG.print(f"drift: {done.check.says}", markup=False, soft_wrap=True)
    show_result(as_json, figures, lambda: None if result is None else OUT.print(views.rebalance_table(result)))
    if result is not None and result.decision == "aborted":
        raise MoetisError(f"the migration was aborted, the old epoch serves: {result.reason}")


@rebalance_commands.command()
def history(
    config: ConfigOption,
    epoch: Annotated[int | None, typer.Option(min=0, help="One epoch, with all that happened to it.")] = None,
    plan_out: Annotated[
        str | None, typer.Option("--plan-out", metavar="FILE", help="With --epoch: write its plan there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what was planned and why it was enacted or left, what moved, and what it did beside what it promised.

    Reads the history file alone; the cluster need not run. A plan written with --plan-out can be served again as
    `initial_plan`.

    [dim]moetis history --config configs/clusters/demo.yaml[/dim]
    [dim]moetis history --config configs/clusters/demo.yaml --epoch 3 --plan-out plan.json[/dim]
    """
    from cluster import history_view, offline
    from cluster.config import load_config
    from placement.planfile import plan_to_json

    if plan_out is not None and epoch is None:
        raise ConfigError("--plan-out writes one epoch's plan; name it with --epoch")
    told = history_view.read_lives(load_config(config), epoch)
    if plan_out is not None:
        path = offline.output_path(plan_out)
        offline.write_result(path, plan_to_json(told[0].plan).encode())
        LOG.print(f"wrote {path}")
    figures = {"epochs": [life.to_dict() for life in told]}
    show_result(as_json, figures, lambda: OUT.print(history_view.lives_table(told, events=epoch is not None)))
