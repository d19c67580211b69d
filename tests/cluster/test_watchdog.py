"""The watchdog: what it kills, what it leaves, and that it works when its owner is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from cluster.watchdog import remains, watched

PROGRAMS = Path("/nowhere")
HOLD = "import sys, time; held = open(sys.argv[1], 'w'); print('open', flush=True); time.sleep(60)"


def _holder(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_with_a_file_of_the_folder_open_is_killed_and_the_folder_goes(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with watched(folder, PROGRAMS):
        inside, outside = _holder(folder / "log"), _holder(tmp_path / "other")
    assert inside.wait(10) == -9
    assert outside.poll() is None
    assert not folder.exists()
    outside.kill()
    outside.wait()


def test_another_program_that_reads_a_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    reader = subprocess.Popen(["tail", "-f", str(log)])
    time.sleep(0.2)
    assert remains(str(tmp_path), str(PROGRAMS)) == []
    reader.kill()
    reader.wait()


def test_the_folder_goes_although_its_owner_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    owner = (
        "import pathlib, sys, time; from cluster.watchdog import watched\n"
        "with watched(pathlib.Path(sys.argv[1]), pathlib.Path('/nowhere')): print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", owner, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
