"""The two consoles: results on stdout, everything else on stderr; and what all commands do with them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

OUT = Console(highlight=False)
LOG = Console(stderr=True, highlight=False)


def show_result(as_json: bool, figures: dict[str, Any], show: Callable[[], None]) -> None:
    """One JSON object on a line of stdout, or whatever show prints for people."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        show()


@contextmanager
def working(what: str) -> Iterator[None]:
    with LOG.status(f"{what} ..."):
        yield
