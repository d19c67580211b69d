"""How long a report of a large plan takes to make and to open, and how large its file is.

A synthetic trace of 58 layers x 256 experts, top-8, on 4 nodes x 8 GPUs, with loads as skewed as real ones; the plan
turns every rank's rows round, so that there is much to move. Opening: in headless Chromium, a fresh one each time,
until the text can be read, and until the first chart is drawn; the baseline is the page without its charts.

usage: python scripts/bench/report.py [--tokens 40000] [--runs 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from placement.baselines import linear_placement
from placement.core import Placement
from placement.planfile import Plan
from placement.report import Sizes, make_report, render_chat, render_html, render_markdown, report_to_json
from placement.topology import load_topology
from placement.trace import RoutingTrace

LAYERS, EXPERTS, TOP_K, RANKS, ROWS = 58, 256, 8, 32, 9
LIMITS = {"made_s": 10.0, "opened_s": 2.0, "file_mb": 6.0}


def skewed_trace(num_tokens: int, seed: int = 0) -> RoutingTrace:
    """Experts drawn without return, with chances of a gamma law of their own in each layer; 2,000 different tokens."""
    rng = np.random.default_rng(seed)
    drawn = np.empty((2000, LAYERS, TOP_K), np.uint8)
    for layer in range(LAYERS):
        chance = np.log(rng.gamma(1.5, size=EXPERTS))
        keys = chance - np.log(-np.log(rng.random((2000, EXPERTS), dtype=np.float32) + 1e-12) + 1e-12)
        drawn[:, layer] = np.argpartition(-keys, TOP_K, axis=1)[:, :TOP_K]
    experts = drawn[rng.integers(0, 2000, num_tokens)]
    token = np.arange(num_tokens)
    return RoutingTrace(
        num_experts=EXPERTS,
        experts=experts,
        request=(token // 100).astype(np.int64),
        position=(token % 100).astype(np.int32),
        step=np.zeros(num_tokens, np.int64),
        source_rank=np.full(num_tokens, -1, np.int32),
        phase=np.zeros(num_tokens, np.uint8),
        workload=(token // 100 % 8).astype(np.uint8),
        workload_names=("code", "prose", "law", "maths", "mail", "chat", "news", "logs"),
        model="synthetic 58 x 256",
    )


def synthetic_plan() -> tuple[Placement, Plan]:
    before = linear_placement(LAYERS, EXPERTS, RANKS, ROWS)
    table = np.roll(before.physical_to_logical.reshape(LAYERS, RANKS, ROWS), 1, axis=1).reshape(LAYERS, -1)
    after = replace(before, epoch=1, physical_to_logical=table)
    # Any figures will do: the page has a table and a chart of them.
    scores = {"nodes_visited": 2.7, "ranks_visited": 6.9, "load_max_over_mean": 1.2}
    measured = dict.fromkeys(("before", "eplb", "after"), scores)
    return before, Plan(placement=after, topology=load_topology("4x8"), measured=measured)


def time_opening(page: Path) -> tuple[float, float, float]:
    """Seconds until the document is there, until the first chart is drawn, and to draw all others by scrolling."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1100,900"):
        options.add_argument(f"--{flag}")
    options.page_load_strategy = "none"
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        wait = WebDriverWait(browser, 120, poll_frequency=0.01)
        browser.get(page.as_uri())
        wait.until(lambda one: one.execute_script("return document.readyState === 'complete'"))
        script = "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
        document_s = browser.execute_script(script) / 1000
        drawn = "document.querySelector('.plot .main-svg') || !document.querySelector('.plot')"
        first_s = wait.until(lambda one: one.execute_script(f"return {drawn} ? performance.now() : 0")) / 1000
        start = time.perf_counter()
        for chart in browser.find_elements("css selector", ".plot"):
            browser.execute_script("arguments[0].scrollIntoView()", chart)
            wait.until(lambda one: one.execute_script("return arguments[0].querySelector('.main-svg')", chart))  # noqa: B023
        return document_s, first_s, time.perf_counter() - start


def without_charts(page: str) -> str:
    """The page with its text and tables alone."""
    import re

    return re.sub(r"<script.*?</script>|<div class=\"plot\".*?</div>", "", page, flags=re.DOTALL)


def measure(num_tokens: int, runs: int, folder: Path) -> dict[str, Any]:
    trace, (before, plan) = skewed_trace(num_tokens), synthetic_plan()
    sizes = Sizes(expert_bytes=44_000_000, token_bytes=14_336)
    made, cpu = [], []
    for run in range(runs):
        print(f"making {run + 1} of {runs}", file=sys.stderr)
        start, start_cpu = time.perf_counter(), time.process_time()
        report = make_report(plan, trace, before=before, sizes=sizes)
        page = render_html(report)
        made.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    path, bare = folder / "report.html", folder / "bare.html"
    path.write_text(page)
    bare.write_text(without_charts(page))
    figures: dict[str, Any] = {
        "made_s": min(made),
        "made_cpu_s": min(cpu),
        "file_mb": len(page.encode()) / 1e6,
        "markdown_mb": len(render_markdown(report).encode()) / 1e6,
        "json_mb": len(report_to_json(report).encode()) / 1e6,
        "chat_characters": len(render_chat(report)),
    }
    if shutil.which("chromium") and shutil.which("chromedriver"):
        print("opening", file=sys.stderr)
        opened = [time_opening(path) for _ in range(runs)]
        names = ("text_s", "opened_s", "all_charts_s")
        figures |= {name: min(one[index] for one in opened) for index, name in enumerate(names)}
        figures["opened_without_charts_s"] = min(time_opening(bare)[0] for _ in range(runs))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(given.tokens, given.runs, Path(folder))
    print(f"{LAYERS} layers x {EXPERTS} experts, {RANKS} ranks, {given.tokens:,} tokens; best of {given.runs}")
    for name, value in figures.items():
        limit = f"   (limit {LIMITS[name]:g})" if name in LIMITS else ""
        print(f"{name:26s} {value:10.3f}{limit}")
    if given.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "load_1min": os.getloadavg()[0]}
        record = {
            "date": datetime.now(UTC).isoformat(),
            "commit": commit,
            **machine,
            "tokens": given.tokens,
            **figures,
        }
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
