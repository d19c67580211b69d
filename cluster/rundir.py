"""The run dir: one cluster at a time keeps its trace, history and contact file there."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from placement.errors import ConfigError


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Make the folder if need be, and keep it for this process alone; the lock ends with the process at the latest.

    Raises ConfigError where it can't be written to, or another cluster runs there.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"run_dir '{run_dir}': cannot be used: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run_dir '{run_dir}': another cluster runs there; give this one its own run_dir"
            ) from None
        yield
