"""Soak: the demo's traffic for a while, in turns without and with rebalancing.

Prints a table and writes JSON: tokens per second without and with rebalancing (without is the baseline), the recorder's
share of the time, and how memory, open files and actors grew from the first turn to the last.

    python scripts/bench/soak.py --seconds 300 --out docs/measured/soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from cluster.demo import load_prompts
from cluster.demo_run import DEMO_PROMPTS, demo_config
from cluster.fleet import Fleet
from cluster.local_ray import local_cluster
from placement.errors import MoetisError
from workers.requests import GenerationRequest

AT_A_TIME, NEW = 16, 48
REBALANCE_EVERY_S = 5.0


class Rebalancer:
    """Asks for a rebalance every few seconds while it is on; the gate decides."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._on = threading.Event()
        self.decisions: list[str] = []

    def start(self) -> threading.Thread:
        self._on.set()
        thread = threading.Thread(target=self._run)
        thread.start()
        return thread

    def stop(self) -> None:
        self._on.clear()

    def _run(self) -> None:
        while self._on.is_set():
            try:
                self.decisions.append(self._fleet.rebalance().decision)
            except MoetisError as error:
                self.decisions.append(f"failed: {error}")
            deadline = time.monotonic() + REBALANCE_EVERY_S
            while self._on.is_set() and time.monotonic() < deadline:
                time.sleep(0.1)


def serve(fleet: Fleet, prompts: list[tuple[int, ...]], seconds: float, first: int) -> tuple[int, float]:
    """Waves of requests until the time is over: tokens, and the seconds that they took."""
    start, tokens, number = time.monotonic(), 0, first
    while time.monotonic() - start < seconds:
        requests = [
            GenerationRequest(
                request=str(number + index), prompt=prompts[(number + index) % len(prompts)], max_new_tokens=NEW
            )
            for index in range(AT_A_TIME)
        ]
        number += len(requests)
        tokens += sum(len(generation.tokens()) for generation in fleet.submit(requests))
    return tokens, time.monotonic() - start


def footprint(fleet: Fleet) -> dict[str, float]:
    """Of the serving process and its workers: resident MB, open files, threads; and how many actors there are."""
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in fleet.pids().values())]
    return {
        "rss_mb": sum(process.memory_info().rss for process in processes) / 1e6,
        "open_files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
        "actors": len(fleet.members()),
    }


def run(seconds: float, num_turns: int, run_dir: Path) -> dict[str, Any]:
    config = demo_config(run_dir)
    prompts = [prompt.tokens for prompt in load_prompts(DEMO_PROMPTS, config.model, 100)]
    rates: dict[str, list[float]] = {"off": [], "on": []}
    footprints = []
    with (
        local_cluster(name="soak", num_cpus=8, object_store_mb=config.ray.object_store_mb),
        Fleet(config, note=lambda text: print(text, file=sys.stderr, flush=True)) as fleet,
    ):
        serve(fleet, prompts, seconds / num_turns / 2, 0)
        rebalancer = Rebalancer(fleet)
        for turn in range(num_turns):
            kind = "on" if turn % 2 else "off"
            thread = rebalancer.start() if kind == "on" else None
            tokens, took = serve(fleet, prompts, seconds / num_turns, 100_000 * (turn + 1))
            rebalancer.stop()
            if thread is not None:
                thread.join()
            rates[kind].append(tokens / took)
            footprints.append(footprint(fleet))
        statuses = fleet.status()
        recorded = max(status.recorder["record_s"] for status in statuses)
    return {
        "seconds": seconds,
        "tokens_per_s": {kind: statistics.median(found) for kind, found in rates.items()},
        "turns": rates,
        "decisions": rebalancer.decisions,
        "recorder_share": recorded / (seconds * (1 + 0.5 / num_turns)),
        "footprint_first": footprints[0],
        "footprint_last": footprints[-1],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }


def show(figures: dict[str, Any]) -> None:
    rates = figures["tokens_per_s"]
    print(f"tokens/s: {rates['off']:.0f} with rebalancing off, {rates['on']:.0f} on ({rates['on'] / rates['off']:.2f})")
    print(f"decisions: {figures['decisions']}; recorder: {figures['recorder_share']:.2%} of the time")
    for name, first in figures["footprint_first"].items():
        print(f"{name:12} {first:10.0f} -> {figures['footprint_last'][name]:10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moetis-soak-") as folder:
        figures = run(options.seconds, options.turns, Path(folder))
    show(figures)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
