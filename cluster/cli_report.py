"""`moetis report`: what a plan does, for people, for machines, for a chat. It starts without Ray and without torch."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli_offline import CountsArgument, CountsKeyOption, PlanArgument
from cluster.terminal import LOG, OUT, working
from placement.errors import ConfigError

if TYPE_CHECKING:
    from placement.report import Report

report_commands = typer.Typer()


class Form(StrEnum):
    HTML = "html"
    MARKDOWN = "markdown"
    JSON = "json"
    CHAT = "chat"


@report_commands.command()
def report(
    plan: PlanArgument,
    trace: CountsArgument,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where to write it: .html, .md, .json, or .txt for a chat.")
    ] = None,
    form: Annotated[
        Form | None, typer.Option("--format", help="Whatever the file is called; on stdout without --out.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Print a few lines for a chat (besides any --out).")] = False,
    current: Annotated[str | None, typer.Option(metavar="PLAN", help="The plan that it would replace.")] = None,
    history: Annotated[
        str | None, typer.Option(metavar="FILE", help="A cluster's history.sqlite: did past plans keep their promise?")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|CONFIG", help="A known model or a config.json: bytes of links and migration."),
    ] = None,
    expert_bytes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Weights of one expert, in place of --model's.")
    ] = None,
    token_bytes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="One hidden state as it is sent, in place of --model's.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where the verdict is to apply a part: write that part as a plan."),
    ] = None,
    counts_key: CountsKeyOption = None,
    title: Annotated[str, typer.Option(help="The heading.")] = "Moetis placement report",
) -> None:
    """Report on a plan: a verdict in words, what it gains and moves, on what evidence.

    The page is one file that works offline. From counts alone, load and memory are shown and nothing of hops.

    [dim]moetis report plan.json trace/ --current present.json --out report.html[/dim]
    [dim]moetis report plan.json trace/ --chat[/dim]
    """
    from cluster import offline
    from cluster.reporting import ReportInput, form_of, gather, part_of, render

    if out is None and form is None and not chat:
        raise ConfigError("nothing to write: give --out FILE, --format, or --chat")
    path = offline.output_path(out) if out is not None else None
    part_path = offline.output_path(part, "--part") if part is not None else None
    chosen = str(form) if form is not None else None if path is None else form_of(path)
    given = ReportInput(
        plan=plan,
        trace=trace,
        current=current,
        history=history,
        model=model,
        expert_bytes=expert_bytes,
        token_bytes=token_bytes,
        counts_key=counts_key,
        title=title,
    )
    with working("reading and counting"):
        made, present = gather(given)
    if chosen is not None:
        _write(made, chosen, path)
    if chat and (chosen != Form.CHAT or path is not None):
        sys.stdout.write(render(made, Form.CHAT))
    if part_path is not None:
        offline.write_result(part_path, part_of(made, present), "--part")
        LOG.print(f"wrote {part_path}")


def _write(made: Report, form: str, path: Path | None) -> None:
    from cluster import offline
    from cluster.reporting import render

    text = render(made, form)
    if path is None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    offline.write_result(path, text.encode())
    OUT.print(str(path), soft_wrap=True)
