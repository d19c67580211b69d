"""The soak, short: a cluster serves and rebalances, no request fails, and nothing is left over from either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running import ROOT, own_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_serving_and_rebalancing_leave_no_process_and_no_file_open(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, "scripts/bench/soak.py", "--seconds", "21", "--turns", "3", "--out", str(out)],
        cwd=ROOT,
        env=own_environment(tmp_path) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    assert found["errors"] == []
    decided = {decision for decisions in found["decisions"].values() for decision in decisions}
    assert decided <= {"applied", "left", "no drift"}
    # Memory of so short a run is still filling its buffers: `--seconds 300` is for that.
    assert set(found["grew"]) <= {"rss_mb"}, found["footprints"]
