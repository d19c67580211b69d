"""The command line where its standard streams are closed, full, or left by their reader."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.running_cli import ROOT

SHOW = f"{sys.executable} -m cluster topology show configs/topology/demo-2x2.yaml --json"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (f"{SHOW} >&-", 2, "moetis: stdout is closed; results go there (> /dev/null throws them away)"),
        (f"{SHOW} > /dev/full", 1, "moetis: failed: stdout: No space left on device"),
        (f"{SHOW} <&- | wc -l", 0, ""),
        (f"{SHOW} 2>&- > /dev/null", 0, ""),
        (f"{sys.executable} -m cluster serve --config configs/clusters/demo.yaml <&-", 2, "moetis: stdin is closed"),
    ],
)
def test_a_stream_that_is_closed_or_full_is_one_clear_sentence(command: str, status: int, said: str) -> None:
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.strip().startswith(said)) == (status, True), done.stderr
    assert len(done.stderr.splitlines()) <= 1
