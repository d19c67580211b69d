"""Chaos: 200 requests of the `openai` client, 16 at a time, while experts move three times and two workers are killed.

Prints a table and writes JSON: how many requests completed, how many texts differ from the plain model's, and the
longest pause between two pieces of a stream: in quiet (the baseline), while the service plans, while experts move, and
from a kill until every seat is taken again.

    python scripts/bench/chaos.py --out docs/measured/chaos.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from served import Crowd, Served, Told, Wish, demo_prompts, served_demo, stamp

from cluster import history as states
from cluster.answers import answer
from cluster.config import history_path
from cluster.history import History
from cluster.joining import joined_service
from cluster.verify import plain_texts
from placement.errors import MoetisError

AT_A_TIME = 16
SHORTEST, LONGEST = 16, 160
WHOLE_AGAIN_S = 240.0
QUIET, PLANNING, MOVING, KILLED = "quiet", "the service plans", "experts move", "a worker was killed"
# When a share of the requests has ended, what happens next.
PLAN = ((0.10, MOVING), (0.25, KILLED), (0.45, MOVING), (0.60, KILLED), (0.80, MOVING))


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when something went on, by time.monotonic()."""

    kind: str
    start: float
    end: float


class Trouble:
    """Makes it, one thing after the other, and remembers from when to when each lasted."""

    def __init__(self, served: Served, service: Any, seed: int) -> None:
        self._served = served
        self._service = service
        self._random = random.Random(seed)
        self._history = History(history_path(served.config))
        self.spans: list[Span] = []
        self.said: list[dict[str, Any]] = []
        self._everyone = self._actors()

    def make(self, kind: str) -> None:
        print(f"now: {kind}", file=sys.stderr, flush=True)
        if kind == KILLED:
            self._kill()
        else:
            self._move()

    def _kill(self) -> None:
        before = self._actors()
        victim = self._random.choice(self._served.workers())
        start = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        while len(now := self._actors()) < len(self._everyone) or now == before:
            if time.monotonic() > start + WHOLE_AGAIN_S:
                raise MoetisError(f"not every seat was taken again {WHOLE_AGAIN_S:.0f} s after a kill")
            time.sleep(0.1)
        end = time.monotonic()
        self.spans.append(Span(KILLED, start, end))
        self.said.append({"what": "kill -9 of a worker, until every seat is taken again", "s": end - start})

    def _actors(self) -> set[str]:
        return {member.actor for member in answer(self._service.members.remote())}

    def _move(self) -> None:
        start = time.monotonic()
        result = answer(self._service.rebalance.remote(False))
        end = time.monotonic()
        self.spans.append(Span(PLANNING, start, end))
        moves = 0 if result.migration is None else result.migration.num_moves
        began = self._moved_from(result.plan.placement.epoch)
        if began is not None:
            self.spans.append(Span(MOVING, began, end))
        self.said.append(
            {
                "what": f"rebalance: {result.decision}, {moves} experts",
                "s": end - start,
                "plan_s": result.plan_s,
                "copy_s": result.copy_s,
                "switch_s": result.switch_s,
            }
        )

    def _moved_from(self, epoch: int) -> float | None:
        """When the first copy of an epoch began, by this machine's monotonic clock."""
        for event in self._history.events():
            if event.epoch == epoch and event.state == states.COPYING:
                at = datetime.fromisoformat(event.at).timestamp()
                return at - time.time() + time.monotonic()
        return None


def make_wishes(prompts: list[str], number: int, seed: int) -> list[Wish]:
    rng = random.Random(seed)
    return [
        Wish(name=str(index), prompt=prompts[index % len(prompts)], tokens=rng.randint(SHORTEST, LONGEST))
        for index in range(number)
    ]


def pauses(told: list[Told], spans: list[Span]) -> dict[str, list[float]]:
    """Seconds between two pieces of a stream, by the worst that went on meanwhile."""
    found: dict[str, list[float]] = {kind: [] for kind in (QUIET, PLANNING, MOVING, KILLED)}
    for one in told:
        for before, after in pairwise(one.moments):
            kinds = {span.kind for span in spans if before < span.end and after > span.start}
            kind = next((kind for kind in (KILLED, MOVING, PLANNING) if kind in kinds), QUIET)
            found[kind].append(after - before)
    return found


def summary(gaps: list[float], step_s: float) -> dict[str, float]:
    if not gaps:
        return {"pauses": 0}
    longest = max(gaps)
    p99 = sorted(gaps)[int(0.99 * (len(gaps) - 1))]
    return {"pauses": len(gaps), "longest_s": longest, "p99_s": p99, "longest_steps": longest / step_s}


def run(number: int, seed: int, folder: Path) -> dict[str, Any]:
    with served_demo(folder) as served, joined_service(served.config) as service:
        wishes = make_wishes(demo_prompts(served.config), number, seed)
        # What only the first requests pay for (first compilations, first connections) is no part of a normal step.
        warm = Crowd(served, wishes[:AT_A_TIME], at_a_time=AT_A_TIME)
        warm.start()
        warm.join()
        crowd, trouble = Crowd(served, wishes, at_a_time=AT_A_TIME), Trouble(served, service, seed)
        start = time.monotonic()
        crowd.start()
        for share, kind in PLAN:
            while len(crowd.told) < share * number:
                time.sleep(0.05)
            trouble.make(kind)
        crowd.join()
        seconds, measured_at = time.monotonic() - start, stamp()
    plain = plain_texts(served.config.worker_options(), [(wish.prompt, wish.tokens) for wish in wishes])
    expected = dict(zip((wish.name for wish in wishes), plain, strict=True))
    errors = {one.wish.name: one.error for one in crowd.told if one.error is not None}
    found = pauses(crowd.told, trouble.spans)
    step_s = statistics.median(found[QUIET])
    return {
        "requests": number,
        "at_a_time": AT_A_TIME,
        "completed": len(crowd.told) - len(errors),
        "errors": errors,
        "wrong_texts": sorted(one.wish.name for one in crowd.told if one.text != expected[one.wish.name]),
        "tokens": sum(wish.tokens for wish in wishes),
        "seconds": seconds,
        "normal_step_s": step_s,
        "pauses": {kind: summary(gaps, step_s) for kind, gaps in found.items()},
        "trouble": trouble.said,
        **measured_at,
    }


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['completed']} of {figures['requests']} requests completed, {len(figures['errors'])} errors")
    print(f"{len(figures['wrong_texts'])} texts differ from the plain model's; {figures['tokens']} tokens asked for")
    step_s = figures["normal_step_s"]
    print(f"{'pause in a stream':22} {'longest':>9} {'p99':>9} {'in steps':>9}  (a step: {step_s:.3f} s)")
    for kind, found in figures["pauses"].items():
        if found["pauses"]:
            print(f"{kind:22} {found['longest_s']:8.3f}s {found['p99_s']:8.3f}s {found['longest_steps']:9.1f}")
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
