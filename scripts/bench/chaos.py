"""Chaos: 200 requests of the `openai` client, 16 at a time, while experts move three times and two workers are killed.

Prints a table and writes JSON: how many requests completed, how many texts differ from the plain model's, and the
longest pause between two pieces of a stream: in quiet (the baseline), while the service plans, while experts move, and
from a kill until every seat is taken again. A normal step is the median pause in quiet.

Text comes in whole characters, and some of those take two or three tokens, hence as many steps: the plain model's
tokens tell which. The pause before such a piece is counted as so many pauses between tokens (and as it is in
`longest_piece_s`). Beside it stands what the workers took from the end of one step to the end of the next, by the clock
that all processes of a machine share.

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
from datetime import datetime
from pathlib import Path
from typing import Any

import ray
from pauses import KILLED, KINDS, MOVING, PLANNING, QUIET, Span, of_kind, pauses, summary, tokens_due
from served import Crowd, Others, Served, Wish, demo_prompts, served_demo, stamp

from cluster import history as states
from cluster.answers import answer
from cluster.config import history_path
from cluster.history import History
from cluster.joining import joined_service
from cluster.local_ray import read_contact
from cluster.text import load_tokenizer
from cluster.verify import plain_tokens
from placement.errors import MoetisError
from workers.step_clock import StepSeconds

AT_A_TIME = 16
SHORTEST, LONGEST = 16, 160
WHOLE_AGAIN_S = 240.0
# When a share of the requests has ended, what happens next.
PLAN = ((0.10, MOVING), (0.25, KILLED), (0.45, MOVING), (0.60, KILLED), (0.80, MOVING))


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


def step_ends(served: Served, service: Any) -> list[list[float]]:
    """When the steps of each founding ended, on the ranks that are there, by the clock of this machine."""
    namespace = read_contact(served.config.run_dir).namespace
    ends: dict[tuple[str, int], list[float]] = {}
    for member in answer(service.members.remote()):
        steps: list[StepSeconds] = answer(ray.get_actor(member.actor, namespace=namespace).recent_steps.remote())
        for step in steps:
            ends.setdefault((member.actor, step.step >> 32), []).append(step.began_s + step.total_s)
    return list(ends.values())


def run(number: int, seed: int, folder: Path) -> dict[str, Any]:
    with served_demo(folder) as served, joined_service(served.config) as service:
        wishes = make_wishes(demo_prompts(served.config), number, seed)
        # What only the first requests pay for (first compilations, first connections) is no part of a normal step.
        warm = Crowd(served, wishes[:AT_A_TIME], at_a_time=AT_A_TIME)
        warm.start()
        warm.join()
        crowd, trouble = Crowd(served, wishes, at_a_time=AT_A_TIME), Trouble(served, service, seed)
        start = time.monotonic()
        with Others(served) as others:
            crowd.start()
            for share, kind in PLAN:
                while len(crowd.told) < share * number:
                    time.sleep(0.05)
                trouble.make(kind)
            crowd.join()
        seconds, measured_at = time.monotonic() - start, stamp()
        steps = [[end for end in ends if end > start] for ends in step_ends(served, service)]
    tokenizer = load_tokenizer(served.config.model)
    plain = plain_tokens(served.config.worker_options(), [(wish.prompt, wish.tokens) for wish in wishes])
    expected = dict(zip((wish.name for wish in wishes), plain, strict=True))
    texts = {name: tokenizer.decode(tokens, skip_special_tokens=True) for name, tokens in expected.items()}
    errors = {one.wish.name: one.error for one in crowd.told if one.error is not None}
    found = [
        pause
        for one in crowd.told
        for pause in pauses(one.moments, trouble.spans, tokens_due(one, expected[one.wish.name], tokenizer))
    ]
    at_workers = [pause for ends in steps for pause in pauses(ends, trouble.spans)]
    step_s = statistics.median(pause.seconds for pause in of_kind(found, QUIET))
    return {
        "requests": number,
        "at_a_time": AT_A_TIME,
        "completed": len(crowd.told) - len(errors),
        "errors": errors,
        "wrong_texts": sorted(one.wish.name for one in crowd.told if one.text != texts[one.wish.name]),
        "tokens": sum(wish.tokens for wish in wishes),
        "seconds": seconds,
        "normal_step_s": step_s,
        "worker_step_s": statistics.median(pause.seconds for pause in of_kind(at_workers, QUIET)),
        "pauses": {kind: summary(of_kind(found, kind), of_kind(at_workers, kind), step_s) for kind in KINDS},
        "trouble": trouble.said,
        "cores_of_others": others.cores,
        **measured_at,
    }


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['completed']} of {figures['requests']} requests completed, {len(figures['errors'])} errors")
    print(f"{len(figures['wrong_texts'])} texts differ from the plain model's; {figures['tokens']} tokens asked for")
    step_s = figures["normal_step_s"]
    print(
        f"a normal step: {step_s:.3f} s, at the workers {figures['worker_step_s']:.3f} s; other programs took "
        f"{figures['cores_of_others']:.2f} cores"
    )
    print(f"{'pause in a stream':22} {'longest':>9} {'p99':>9} {'in steps':>9} {'at workers':>11}")
    for kind, found in figures["pauses"].items():
        if found["pauses"]:
            print(
                f"{kind:22} {found['longest_s']:8.3f}s {found['p99_s']:8.3f}s {found['longest_steps']:9.1f} "
                f"{found.get('longest_at_workers_s', float('nan')):10.3f}s"
            )
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
