"""The two consoles: results on stdout, everything else on stderr; and what all commands do with them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from placement.errors import ConfigError

OUT = Console(highlight=False)
LOG = Console(stderr=True, highlight=False)


def hold_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed: the next file that is opened would take its number.

    Raises ConfigError where it is stdout, since results go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  (for the life of the process)
    if sys.stdout is None:
        raise ConfigError("stdout is closed; results go there (> /dev/null throws them away)")


def show_result(as_json: bool, figures: dict[str, Any], show: Callable[[], None]) -> None:
    """One JSON object on a line of stdout, or whatever show prints for people."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        show()


class Notes:
    """What a cluster says of itself: beside the spinner while it comes up; then a line each, with the time."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._is_up = False

    def __call__(self, text: str) -> None:
        if self._is_up:
            LOG.print(f"{datetime.now():%H:%M:%S} {text}", markup=False, soft_wrap=True)
        else:
            self._status.update(f"{text} ...")

    def up(self, text: str) -> None:
        """The cluster is up, which text says."""
        self._is_up = True
        self._status.stop()
        LOG.print(text)


@contextmanager
def working(what: str) -> Iterator[None]:
    with LOG.status(f"{what} ..."):
        yield
