"""Serving and rebalancing as Ray jobs, on a Ray cluster that an operator started; the repository ships with the job."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
import yaml

from tests.e2e.running import ROOT, own_environment, still_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 300
RAY = str(Path(sys.executable).parent / "ray")


def _free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class Head:
    """A Ray head of the test's own: loopback, token authentication, its own folder; jobs are submitted to it."""

    def __init__(self, folder: Path) -> None:
        gcs, dashboard, client = _free_ports(3)
        token = folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = own_environment(folder) | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        # What the head's own processes inherit, and jobs from them.
        del self.environment["RAY_ADDRESS"]
        self._temp = Path("/tmp") / f"moetis-{secrets.token_hex(4)}"
        command = [
            *(RAY, "start", "--head", "--block", "--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            *(f"--dashboard-port={dashboard}", "--node-ip-address=127.0.0.1", f"--port={gcs}"),
            *(f"--ray-client-server-port={client}", "--num-cpus=4", f"--object-store-memory={128 * 10**6}"),
            *(f"--temp-dir={self._temp}", "--labels=moetis/node=a,moetis/rack=r1"),
        ]
        self._log = (folder / "head").open("w")
        self.process = subprocess.Popen(command, env=self.environment, stdout=self._log, stderr=self._log)

    def job(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [RAY, "job", *command],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def end(self) -> list[str]:
        """End everything; what is alive after a while."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(signal.SIGTERM)
        left = still_alive(family)
        for process in family:
            if process.is_running():
                process.kill()
        self._log.close()
        subprocess.run(["rm", "-rf", str(self._temp)], check=False)
        return left


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Head]:
    started = Head(folder)
    yield started
    started.end()


def test_serve_and_rebalance_run_as_ray_jobs(head: Head, folder: Path) -> None:
    raw = yaml.safe_load((ROOT / "configs" / "clusters" / "demo.yaml").read_text())
    nodes = [{"moetis/node": "a", "moetis/rack": "r1"}]
    cluster = {"topology": "1x2", "slots_per_rank": 20, "ray": {"address": "auto", "node_labels": nodes}}
    config = folder / "cluster.yaml"
    config.write_text(yaml.safe_dump(raw | cluster | {"run_dir": str(folder / "run")}))
    (port,) = _free_ports(1)
    serve = ("python", "-m", "cluster", "serve", "--config", str(config), "--http", f"127.0.0.1:{port}")
    _until(lambda: head.job("list").returncode == 0, head)
    begun = head.job("submit", "--no-wait", "--submission-id", "serving", "--working-dir", ".", "--", *serve)
    assert begun.returncode == 0, begun.stderr
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    _until(lambda: _answers(client), head)
    for _ in range(3):
        client.completions.create(model="demo", prompt="def main(", max_tokens=60, temperature=0)
    moved = head.job(
        *("submit", "--working-dir", ".", "--"),
        *("python", "-m", "cluster", "rebalance", "--config", str(config), "--json"),
    )
    assert moved.returncode == 0, moved.stdout + moved.stderr
    result = json.loads(next(line for line in moved.stdout.splitlines() if line.startswith("{")))
    assert result["decision"] in ("applied", "left")
    twin = folder / "twin.yaml"
    twin.write_text(yaml.safe_dump(raw | cluster | {"run_dir": str(folder / "twin")}))
    second = head.job("submit", "--working-dir", ".", "--", "python", "-m", "cluster", "serve", "--config", str(twin))
    assert second.returncode != 0
    assert "another Moetis cluster serves on this Ray cluster" in second.stdout
    assert _answers(client)
    assert head.job("stop", "serving").returncode == 0
    assert not (folder / "run" / "cluster.json").exists()


def _answers(client: openai.OpenAI) -> bool:
    try:
        return client.completions.create(model="demo", prompt="a", max_tokens=1).choices != []
    except openai.APIError:
        return False


def _until(true: object, head: Head) -> None:
    assert callable(true)
    deadline = time.monotonic() + START_S
    while not true():
        assert time.monotonic() < deadline, head.job("logs", "serving").stdout
        time.sleep(0.5)
