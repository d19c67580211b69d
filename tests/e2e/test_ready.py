"""`moetis serve --http` as it comes up: readiness, slots by themselves, and what Prometheus gets to see."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import GAUGES
from cluster.verify import plain_texts
from tests.e2e.running import DEMO_OPTIONS, ROOT, Serving, demo_like_config, moetis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

METRICS_S = 60.0
# Absent until something was fetched ahead, which a cache does only where it has found that it pays.
FETCHING_AHEAD = {"ray_moetis_prefetch_precision", "ray_moetis_prefetch_coverage"}
CODE = 10 * ["def read(path):\n", "import numpy as np\n", "package main\n", "func add(a int, b int) int {\n"]
WORDS = 10 * [
    "Um ein neues Dokument zu öffnen, ",
    "Klicken Sie auf ",
    "Para abrir un archivo, ",
    "Haga clic en el botón ",
]
PROMPT, NEW = "def read(path):\n    with open(path) as", 24
MONITORING = ROOT / "configs" / "monitoring"


class Door:
    """Knocks at /ready and /health until it is let in; what it was told, each answer once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.told: list[tuple[int, int, str]] = []
        self._thread = threading.Thread(target=self._knock, daemon=True)
        self._thread.start()

    def _knock(self) -> None:
        while not self.told or self.told[-1][0] != 200:
            try:
                ready, body = get(self._port, "/ready")
                health, _ = get(self._port, "/health")
            except OSError:
                time.sleep(0.2)
                continue
            if (ready, health, body) not in self.told:
                self.told.append((ready, health, body))
            time.sleep(0.2)


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    # Room for the model, its KV cache, and some 70 of the 160 experts that a rank has.
    workers = {"slots": "auto", "memory_gb": 0.085}
    return demo_like_config(folder, topology="2x1", slots_per_rank=20, workers=workers)


@pytest.fixture(scope="module")
def door(port: int) -> Door:
    return Door(port)


@pytest.fixture(scope="module")
def serving(folder: Path, config: Path, port: int, door: Door) -> Iterator[Serving]:
    running = Serving(folder, config, "--http", f"127.0.0.1:{port}", ready="/v1")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(serving: Serving, port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)


def test_it_is_alive_before_it_is_ready_and_says_what_it_waits_for(serving: Serving, door: Door, port: int) -> None:
    deadline = time.monotonic() + 30
    while door.told[-1][0] != 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    # Serve's proxy listens a moment before it knows of the gateway.
    ready, health, bodies = zip(*(told for told in door.told if told[0] != 404), strict=True)
    assert ready[0] == 503
    assert "the workers are starting" in bodies[0]
    assert ready[-1] == 200
    assert json.loads(bodies[-1])["status"] == "ready"
    assert set(health) == {200}


def test_slots_by_themselves_leave_the_text_as_it_is(client: openai.OpenAI, folder: Path, config: Path) -> None:
    text = client.completions.create(model="demo", prompt=PROMPT, max_tokens=NEW, temperature=0).choices[0].text
    assert text == plain_texts(DEMO_OPTIONS, [(PROMPT, NEW)])[0]
    told = moetis(folder, "top", "--config", str(config), "--once", "--json")
    assert told.returncode == 0, told.stderr
    assert 0 < json.loads(told.stdout)["cache_hit_rate"] < 1


def test_every_metric_that_dashboard_and_alerts_ask_for_is_scraped(
    client: openai.OpenAI, serving: Serving, folder: Path, config: Path
) -> None:
    """Traffic, a plan that is enacted, other traffic, and a look for drift: then all that they name is on the page."""
    _write_all(client, CODE)
    done = moetis(folder, "rebalance", "--config", str(config), "--json", timeout_s=300)
    assert json.loads(done.stdout)["decision"] == "applied", done.stdout + done.stderr
    _write_all(client, WORDS)
    done = moetis(folder, "rebalance", "--config", str(config), "--drift", timeout_s=300)
    assert done.returncode == 0, done.stderr
    asked = set()
    for path in MONITORING.iterdir():
        asked |= set(re.findall(r"\bray_moetis_\w+", path.read_text()))
    assert asked == {f"ray_{name}" for name in GAUGES}
    (export,) = serving.ray_folder().glob("session_latest/metrics_export_port_*")
    deadline = time.monotonic() + METRICS_S
    while missing := asked - FETCHING_AHEAD - _scraped(int(export.read_text())):
        assert time.monotonic() < deadline, missing
        _write_all(client, CODE[:1])


def _write_all(client: openai.OpenAI, prompts: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: client.completions.create(model="demo", prompt=prompt, max_tokens=NEW), prompts))


def _scraped(port: int) -> set[str]:
    """The names of all series on the page that Prometheus reads."""
    _, page = get(port, "/metrics")
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
