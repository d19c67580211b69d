"""`moetis top`: a live view of a running cluster."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli_offline import JsonOption
from cluster.terminal import OUT

if TYPE_CHECKING:
    from cluster.config import ClusterConfig
    from cluster.top import Look, Rates

top_commands = typer.Typer()


@top_commands.command()
def top(
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="The cluster's YAML file.")],
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="Between two looks.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Watch a running cluster: ranks, load, hops, hit rate, epoch, and how far a migration is. Ends with Ctrl-C.

    The first figures are since the start, later ones since the look before. With --json each look is one line.

    [dim]moetis top --config configs/clusters/demo.yaml[/dim]
    [dim]moetis top --config configs/clusters/demo.yaml --once --json[/dim]
    """
    from cluster.config import load_config

    cluster = load_config(config)
    with suppress(KeyboardInterrupt):
        if as_json:
            _write_lines(cluster, once, interval)
        else:
            _show(cluster, once, interval)


def _looks(cluster: ClusterConfig, once: bool, interval: float) -> Iterator[tuple[Look, Rates]]:
    from cluster.joining import joined_service
    from cluster.top import look, rates_between

    before = None
    with joined_service(cluster) as service:
        while True:
            now = look(service)
            yield now, rates_between(now, before)
            if once:
                return
            before = now
            time.sleep(interval)


def _write_lines(cluster: ClusterConfig, once: bool, interval: float) -> None:
    from cluster.top_view import look_to_dict

    for now, rates in _looks(cluster, once, interval):
        sys.stdout.write(json.dumps(look_to_dict(cluster.name, now, rates)) + "\n")
        sys.stdout.flush()


def _show(cluster: ClusterConfig, once: bool, interval: float) -> None:
    from rich.live import Live

    from cluster.top_view import look_view

    if once:
        for now, rates in _looks(cluster, once, interval):
            OUT.print(look_view(cluster.name, now, rates))
        return
    with Live(console=OUT, screen=OUT.is_terminal, auto_refresh=False) as live:
        for now, rates in _looks(cluster, once, interval):
            live.update(look_view(cluster.name, now, rates), refresh=True)
