"""The command line as a user runs it, and a small trace to run it on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from cluster.cli import app

ROOT = Path(__file__).parents[2]


def moetis(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=cwd or ROOT,
        env=None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def moetis_here(*arguments: str) -> Result:
    """The same in this process, which is faster; what would end it is in the result's `exception`."""
    return CliRunner().invoke(app, list(arguments))


def write_trace(path: Path, layers: int = 2, experts: int = 8, requests: int = 12) -> Path:
    """Requests of two kinds, each with its own half of the experts."""
    rng = np.random.default_rng(0)
    request = np.repeat(np.arange(requests), 30)
    pick = rng.random((len(request), layers, experts // 2)).argsort(axis=2)[:, :, :2]
    np.savez(
        path,
        experts=(2 * pick + (request // 2 % 2)[:, None, None]).astype(np.uint8),
        request=request.astype(np.int32),
        position=np.tile(np.arange(30), requests).astype(np.int32),
        num_experts=np.int64(experts),
    )
    return path
