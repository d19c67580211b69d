"""`moetis scale` on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli_offline import JsonOption
from cluster.terminal import OUT, show_result, working

scale_commands = typer.Typer()


@scale_commands.command()
def scale(
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="The cluster's YAML file.")],
    add: Annotated[
        list[int] | None, typer.Option(metavar="SEAT", help="Have this seat taken; may be repeated.")
    ] = None,
    drain: Annotated[list[int] | None, typer.Option(metavar="SEAT", help="Empty this seat and end its worker.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait.")] = 300,
    as_json: JsonOption = False,
) -> None:
    """Take workers out of a running cluster, or bring them in, while it serves.

    A seat is a rank of the cluster's topology. What a drained seat alone holds moves away first; requests go on.

    [dim]moetis scale --config configs/clusters/demo.yaml --drain 3[/dim]
    """
    from cluster.config import load_config
    from cluster.scale import run_scale

    with working("scaling"):
        seats = run_scale(load_config(config), add=add or (), drain=drain or (), timeout_s=timeout_s)
    show_result(as_json, {"seats": list(seats)}, lambda: OUT.print(f"seats {', '.join(map(str, seats))} serve"))
