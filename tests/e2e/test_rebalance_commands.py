"""What an operator asks of a cluster that serves: previews, drift, the history, the probe, and its metrics."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from cluster.metrics import GAUGES
from tests.e2e.running import Serving, demo_like_config, moetis

PROMPTS = [f"def number_{number}(" for number in range(12)]
METRICS_WITHIN_S = 60


def _metrics(serving: Serving) -> str:
    """What Prometheus would get: every page /metrics that a process of the cluster offers on loopback."""
    pages = []
    for process in serving.family():
        for connection in process.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            try:
                url = f"http://127.0.0.1:{connection.laddr.port}/metrics"
                with urllib.request.urlopen(url, timeout=1) as page:
                    pages.append(page.read().decode(errors="replace"))
            except (OSError, ValueError, psutil.Error, HTTPException):
                continue
    return "\n".join(pages)


@pytest.mark.long
def test_operators_see_before_they_act_and_what_it_did(tmp_path: Path) -> None:
    config = demo_like_config(tmp_path, rebalance={"min_gain": 0.0})
    serving = Serving(tmp_path, config)
    try:
        serving.send(*({"id": name, "prompt": name, "max_new_tokens": 16} for name in PROMPTS))
        serving.wait_for(*PROMPTS)
        preview = json.loads(moetis(tmp_path, "rebalance", "--config", str(config), "--dry-run", "--json").stdout)
        assert preview["decision"].startswith("would ")
        assert preview["epoch"] == 0
        by_drift = moetis(tmp_path, "rebalance", "--config", str(config), "--drift", "--json")
        assert json.loads(by_drift.stdout)["drift"]["due"]
        told = json.loads(moetis(tmp_path, "history", "--config", str(config), "--json").stdout)["epochs"]
        assert [each["epoch"] for each in told] == [0, 1]
        assert told[0]["measured"]["after"]["num_requests"] == len(PROMPTS)
        probed = moetis(tmp_path, "topology", "probe", "--config", str(config), "--gpus-per-node", "4", "--json")
        assert json.loads(probed.stdout)["tree"] == [[0, 1, 2, 3]]
        deadline = time.monotonic() + METRICS_WITHIN_S
        while "ray_moetis_decisions" not in (page := _metrics(serving)) and time.monotonic() < deadline:
            time.sleep(1)
        shown = set(re.findall(r"^ray_(moetis_\w+)\{", page, re.MULTILINE))
        assert {"moetis_epoch", "moetis_ranks_alive", "moetis_decisions", "moetis_tokens_per_second"} <= shown
        assert shown <= set(GAUGES)
        assert serving.end() == 0
    finally:
        serving.kill()
