"""Ends a Ray cluster of one's own when the process that started it is gone, however it went.

Ray's agents notice the death of their parent only after a minute or so. This small process, run by its path with
nothing but the standard library, holds a pipe to the one that started the cluster: at its end, whatever Ray process
still has a file of the cluster's folder open is killed, and the folder removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIES = 100
PAUSE_S = 0.1
WAIT_S = 30.0


@contextmanager
def watched(folder: Path, programs: Path) -> Iterator[None]:
    """Have a cluster's folder and processes removed at the end of the context, or of this process.

    programs: the folder of Ray's own programs.
    """
    dog = subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder), str(programs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C goes to all of a terminal's foreground; this one must outlive the others.
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert dog.stdin is not None
        dog.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            dog.wait(WAIT_S)


def remains(folder: str, programs: str) -> list[int]:
    """The other processes of this Python or of Ray, not older than this one, that have a file of the folder open.

    So neither the one that started the cluster, nor somebody's `tail -f` of a log.
    """
    python, birth, own = os.path.realpath(sys.executable), _birth(Path("/proc/self")), str(os.getpid())
    found = []
    for process in Path("/proc").iterdir():
        # Processes come and go, and those of other users are theirs.
        with contextlib.suppress(OSError):
            # Births are told in ticks of 10 ms: what started in this one's own may be Ray's.
            if not process.name.isdecimal() or process.name == own or _birth(process) < birth:
                continue
            program = str((process / "exe").readlink()).removesuffix(" (deleted)")
            ours = program == python or program.startswith(programs + "/")
            if ours and any(_is_inside(file, folder) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _birth(process: Path) -> int:
    """When a process started, in clock ticks since boot. Its name, in brackets, may hold anything."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[19])


def _is_inside(file: Path, folder: str) -> bool:
    try:
        return str(file.readlink()).startswith(folder + "/")
    except OSError:
        return False


def main(folder: str, programs: str) -> None:
    """Wait for the end of stdin, then clean up."""
    sys.stdin.buffer.read()
    for _ in range(TRIES):
        left = remains(folder, programs)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not left:
            break
        time.sleep(PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
