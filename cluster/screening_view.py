"""What `moetis screen` says: the answer first, then the reasons."""

from __future__ import annotations

from rich.console import Console

from placement.screening import Screening


def print_screening(console: Console, found: Screening, sizes: str) -> None:
    console.print(f"[bold]{found.answer}[/bold]")
    for reason in found.reasons:
        console.print(f"- {reason}", markup=False)
    console.print(
        f"judged on {found.tokens} tokens of {found.requests} requests that were not fitted on, "
        f"in {found.layers_seen} of {found.layers} layers; {sizes}",
        markup=False,
    )
