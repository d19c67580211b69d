"""Chaos: 200 requests, 16 at a time, while experts move three times and two workers are killed.

Prints a table and writes JSON: how many requests completed, how many texts differ from the plain model's, and the
longest pause between two tokens of a stream, in quiet, while experts move, and after a kill. Quiet is the baseline.

    python scripts/bench/chaos.py --out docs/measured/chaos.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.demo import load_prompts
from cluster.demo_run import DEMO_PROMPTS, demo_config
from cluster.fleet import Fleet
from cluster.local_ray import local_cluster
from cluster.verify import verify
from placement.errors import MoetisError
from workers.requests import GenerationRequest

AT_A_TIME = 16
SHORTEST, LONGEST = 16, 160
QUIET, MOVING, KILLED = "quiet", "experts move", "a worker was killed"
# When a share of the requests has ended, what happens next.
PLAN = ((0.10, MOVING), (0.25, KILLED), (0.45, MOVING), (0.60, KILLED), (0.80, MOVING))


@dataclass(slots=True)
class Client:
    """One request at a time from a common list; what came of each, and the moment of every token."""

    requests: queue.SimpleQueue[GenerationRequest]
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    moments: list[list[float]] = field(default_factory=list)

    def run(self, fleet: Fleet) -> None:
        while True:
            try:
                request = self.requests.get_nowait()
            except queue.Empty:
                return
            (generation,) = fleet.submit([request])
            moments, tokens = [], []
            for event in generation.events():
                if event.tokens:
                    moments.append(time.monotonic())
                    tokens.extend(event.tokens)
                if event.end not in (None, "finished"):
                    self.errors[request.request] = f"{event.end}: {event.error}"
            self.texts[request.request] = tuple(tokens)
            self.moments.append(moments)


class Trouble:
    """Makes it, one thing after the other, and remembers from when to when each lasted."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)
        self.spans: list[tuple[str, float, float]] = []
        self.said: list[dict[str, Any]] = []

    @contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.spans.append((kind, start, time.monotonic()))

    def make(self, kind: str) -> None:
        self._wait_for_all()
        if kind == KILLED:
            seat, pid = self._random.choice(sorted(self._fleet.pids().items()))
            with self._span(KILLED):
                os.kill(pid, signal.SIGKILL)
                while not self._fleet.members() or seat in {member.seat for member in self._fleet.members()}:
                    time.sleep(0.02)
                self._wait_for_all()
            self.said.append({"what": f"kill -9 of seat {seat}", "s": self.spans[-1][2] - self.spans[-1][1]})
            return
        with self._span(MOVING):
            result = self._fleet.rebalance(is_gated=False)
        moves = 0 if result.migration is None else result.migration.num_moves
        self.said.append({"what": f"rebalance: {result.decision}, {moves} experts", "s": result.copy_s})

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + 120
        while len(self._fleet.members()) < self._fleet.topology.num_ranks:
            if time.monotonic() > deadline:
                raise MoetisError("a seat was not taken again in 120 s")
            time.sleep(0.1)


def make_requests(config: ClusterConfig, num_requests: int, seed: int) -> list[GenerationRequest]:
    prompts = load_prompts(DEMO_PROMPTS, config.model, 100)
    rng = random.Random(seed)
    return [
        GenerationRequest(
            request=str(number),
            prompt=prompts[number % len(prompts)].tokens,
            max_new_tokens=rng.randint(SHORTEST, LONGEST),
            stream=True,
        )
        for number in range(num_requests)
    ]


def pauses(clients: list[Client], spans: list[tuple[str, float, float]]) -> dict[str, list[float]]:
    """Seconds between two tokens of a stream, by what went on meanwhile; a kill counts before a move."""
    found: dict[str, list[float]] = {QUIET: [], MOVING: [], KILLED: []}
    for client in clients:
        for moments in client.moments:
            for before, after in pairwise(moments):
                kinds = {kind for kind, start, end in spans if before < end and after > start}
                kind = KILLED if KILLED in kinds else MOVING if MOVING in kinds else QUIET
                found[kind].append(after - before)
    return found


def p99(gaps: list[float]) -> float:
    return sorted(gaps)[int(0.99 * (len(gaps) - 1))] if gaps else 0.0


def run(num_requests: int, seed: int, run_dir: Path) -> dict[str, Any]:
    config = demo_config(run_dir)
    requests = make_requests(config, num_requests, seed)
    waiting: queue.SimpleQueue[GenerationRequest] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    clients = [Client(waiting) for _ in range(AT_A_TIME)]

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with (
        local_cluster(name="chaos", num_cpus=8, object_store_mb=config.ray.object_store_mb),
        Fleet(config, note=note) as fleet,
    ):
        trouble = Trouble(fleet, seed)
        start = time.monotonic()
        threads = [threading.Thread(target=client.run, args=(fleet,)) for client in clients]
        for thread in threads:
            thread.start()
        for share, kind in PLAN:
            while sum(len(client.texts) for client in clients) < share * num_requests:
                time.sleep(0.05)
            note(f"now: {kind}")
            trouble.make(kind)
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - start
    texts = {name: tokens for client in clients for name, tokens in client.texts.items()}
    errors = {name: error for client in clients for name, error in client.errors.items()}
    verdict = verify(
        config.worker_options(), [(request.request, request.prompt, texts[request.request]) for request in requests]
    )
    found = pauses(clients, trouble.spans)
    step = statistics.median(found[QUIET])
    return {
        "requests": num_requests,
        "completed": len(texts) - len(errors),
        "errors": errors,
        "tokens": verdict.tokens,
        "wrong_texts": len(verdict.wrong),
        "ties": verdict.ties,
        "seconds": seconds,
        "normal_step_s": step,
        "longest_pause_s": {kind: max(gaps, default=0.0) for kind, gaps in found.items()},
        "p99_pause_s": {
            kind: sorted(gaps)[int(0.99 * (len(gaps) - 1))] if gaps else 0.0 for kind, gaps in found.items()
        },
        "moving_in_steps": max(found[MOVING], default=0.0) / step,
        "trouble": trouble.said,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['completed']} of {figures['requests']} requests completed, {len(figures['errors'])} errors")
    print(f"{figures['tokens']} tokens checked, {figures['wrong_texts']} wrong texts, {figures['ties']} ties")
    print(f"{'pause between two tokens':26} {'longest':>9} {'p99':>9}   (normal step {figures['normal_step_s']:.3f} s)")
    for kind, longest in figures["longest_pause_s"].items():
        print(f"{kind:26} {longest:8.3f}s {figures['p99_pause_s'][kind]:8.3f}s")
    for item in figures["trouble"]:
        print(f"  {item['what']} ({item['s']:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moetis-chaos-") as folder:
        figures = run(options.requests, options.seed, Path(folder))
    show(figures)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(0 if figures["completed"] == options.requests and not figures["wrong_texts"] else 1)


if __name__ == "__main__":
    main()
