"""Soak: the demo's traffic through the gateway for a while, in turns without and with rebalancing.

Prints a table and writes JSON: tokens per second without rebalancing (the baseline), with a look for drift every few
seconds (as `moetis rebalance --drift --every 5s`), and with a plan every few seconds whether it has drifted or not;
the recorder's share of step time; and how memory, open files, threads, processes and actors grew from the first turn to
the last. Exit status 1 where something grew, or a request failed.

    python scripts/bench/soak.py --seconds 300 --out docs/measured/soak.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from served import Crowd, Served, Wish, demo_prompts, served_demo, stamp

from cluster.answers import answer
from cluster.joining import joined_service
from placement.errors import MoetisError

AT_A_TIME, NEW = 16, 48
REBALANCE_EVERY_S = 5.0
OFF, BY_DRIFT, ALWAYS = "off", "by drift", "always"
# What may be there at the end beyond the first turn's: pools of threads and connections fill as they are used.
MOST = {"rss_mb": 1.1, "open_files": 1.1, "threads": 1.2, "processes": 1.0, "actors": 1.0}


class Rebalancer:
    """Looks for drift every few seconds, or asks for a plan without looking; the gate decides."""

    def __init__(self, service: Any, kind: str) -> None:
        self._service = service
        self._kind = kind
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.decisions: list[str] = []

    def __enter__(self) -> Rebalancer:
        if self._kind != OFF:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._off.set()
        if self._kind != OFF:
            self._thread.join()

    def _run(self) -> None:
        while not self._off.wait(REBALANCE_EVERY_S):
            try:
                if self._kind == BY_DRIFT and not answer(self._service.drift.remote()).due:
                    self.decisions.append("no drift")
                else:
                    self.decisions.append(answer(self._service.rebalance.remote()).decision)
            except MoetisError as error:
                self.decisions.append(f"failed: {error}")


def wishes(prompts: list[str], seconds: float) -> Iterator[Wish]:
    """The prompts, over and over, until the time is over."""
    end = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() > end:
            return
        yield Wish(name=str(number), prompt=prompts[number % len(prompts)], tokens=NEW)


def serve(served: Served, prompts: list[str], seconds: float) -> tuple[float, list[str]]:
    """Tokens per second, and what went wrong."""
    crowd = Crowd(served, wishes(prompts, seconds), at_a_time=AT_A_TIME)
    start = time.monotonic()
    crowd.start()
    crowd.join()
    rate = sum(told.tokens for told in crowd.told) / (time.monotonic() - start)
    return rate, [told.error for told in crowd.told if told.error is not None]


def footprint(served: Served, service: Any) -> dict[str, float]:
    """Of all processes of the cluster: resident MB, open files, threads; how many there are, and how many workers."""
    found = {"rss_mb": 0.0, "open_files": 0, "threads": 0, "processes": 0}
    for process in served.family():
        # Ray starts and ends a process now and then.
        with contextlib.suppress(psutil.NoSuchProcess):
            found["rss_mb"] += process.memory_info().rss / 1e6
            found["open_files"] += process.num_fds()
            found["threads"] += process.num_threads()
            found["processes"] += 1
    return found | {"actors": len(answer(service.members.remote()))}


def run(seconds: float, num_turns: int, folder: Path) -> dict[str, Any]:
    rates: dict[str, list[float]] = {OFF: [], BY_DRIFT: [], ALWAYS: []}
    decisions: dict[str, list[str]] = {OFF: [], BY_DRIFT: [], ALWAYS: []}
    footprints, errors = [], []
    with served_demo(folder) as served, joined_service(served.config) as service:
        prompts = demo_prompts(served.config)
        serve(served, prompts, seconds / num_turns / 2)
        for _, kind in zip(range(num_turns), itertools.cycle(rates), strict=False):
            with Rebalancer(service, kind) as rebalancer:
                rate, wrong = serve(served, prompts, seconds / num_turns)
            rates[kind].append(rate)
            decisions[kind] += rebalancer.decisions
            errors += wrong
            footprints.append(footprint(served, service))
        statuses = answer(service.statuses.remote())
    first, last = footprints[0], footprints[-1]
    return {
        "seconds": seconds,
        "tokens_per_s": {kind: statistics.median(found) for kind, found in rates.items() if found},
        "turns": rates,
        "decisions": decisions,
        "errors": errors,
        "recorder_share": max(status.recorder["record_s"] / status.step_s for status in statuses),
        "footprints": footprints,
        "grew": [name for name, most in MOST.items() if last[name] > most * first[name]],
        **stamp(),
    }


def show(figures: dict[str, Any]) -> None:
    rates = figures["tokens_per_s"]
    for kind, rate in rates.items():
        decided = collections.Counter(figures["decisions"][kind])
        print(f"rebalancing {kind:9} {rate:7.0f} tokens/s ({rate / rates[OFF]:.2f}) {dict(decided) or ''}")
    print(f"recorder: {figures['recorder_share']:.2%} of step time")
    print(f"errors: {len(figures['errors'])}; grew beyond what is allowed: {figures['grew'] or 'nothing'}")
    for name, first in figures["footprints"][0].items():
        print(f"{name:12} {first:10.0f} -> {figures['footprints'][-1][name]:10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--turns", type=int, default=6, help="a third of them each without, by drift, always")
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moetis-soak-") as folder:
        figures = run(options.seconds, options.turns, Path(folder))
    show(figures)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(1 if figures["grew"] or figures["errors"] else 0)


if __name__ == "__main__":
    main()
