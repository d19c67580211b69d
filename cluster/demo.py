"""The demo: the whole loop on a real small model, and a check that it did what it says.

Serve, record, plan, move live, serve again; compare every text with the plain model; print and write what was measured.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from cluster.config import ClusterConfig
from cluster.fleet import Fleet, Generation
from cluster.outcomes import RebalanceResult
from cluster.text import load_tokenizer
from cluster.verify import Verdict, verify
from placement.errors import ConfigError
from placement.evaluate import Score, evaluate
from placement.homes import homes_of, random_homes
from placement.planfile import Plan
from placement.topology import Topology
from placement.trace import RoutingTrace, load_trace
from workers.requests import GenerationRequest
from workers.vitals import WorkerStatus

BEFORE, DURING, AFTER = 0, 1, 2
PHASE_STRIDE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    kind: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One pass over the prompts: (prompt index, tokens) of each answer, and what the ranks counted meanwhile."""

    answers: tuple[tuple[int, tuple[int, ...]], ...]
    seconds: float
    lookups: int
    hits: int
    record_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for _, tokens in self.answers)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything that the demo measured. before and after are scores of what was served, on held-out requests."""

    phases: tuple[Phase, Phase, Phase]
    rebalance: RebalanceResult
    before: Score
    after: Score
    verdict: Verdict
    num_prompts: int
    held_out: RoutingTrace
    total_s: float

    @property
    def ok(self) -> bool:
        return (
            not self.verdict.wrong
            and self.rebalance.decision == "applied"
            and self.after.nodes_visited < self.before.nodes_visited
        )


def load_prompts(path: Path, model: Path, limit: int) -> list[Prompt]:
    """Read a JSON-lines file of {"kind", "prompt"}."""
    tokenizer = load_tokenizer(model)
    prompts = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts '{path}': cannot be read: {error}") from error
    for number, line in enumerate(lines[:limit], start=1):
        try:
            raw = json.loads(line)
            kind, text = str(raw["kind"]), str(raw["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'prompts \'{path}\': line {number}: needs {{"kind", "prompt"}}: {error}') from error
        prompts.append(Prompt(kind=kind, text=text, tokens=tuple(tokenizer(text)["input_ids"])))
    if len(prompts) < 2:
        raise ConfigError(f"prompts '{path}': needs two lines at least, has {len(prompts)}")
    return prompts


class Demo:
    """Runs the phases on a fleet. The request number is phase * 1,000,000 + prompt, so its parity is the prompt's."""

    def __init__(self, fleet: Fleet, prompts: Sequence[Prompt], *, max_new_tokens: int, progress: Progress) -> None:
        self._fleet = fleet
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._progress = progress
        numbers = np.arange(len(prompts), dtype=np.int64)
        self._homes = random_homes(numbers, fleet.topology.num_ranks, 0).tolist()

    def serve(self, phase: int, title: str) -> Phase:
        """All prompts once."""
        status, start = self._fleet.status(), time.perf_counter()
        generations = self._submit(phase, 0)
        task = self._progress.add_task(title, total=len(generations))
        answers = [self._take(index, generation, task) for index, generation in enumerate(generations)]
        return self._phase(answers, status, start)

    def serve_while_moving(self) -> tuple[Phase, RebalanceResult]:
        """Start a rebalance, and serve the prompts again and again until it is done; each of them once at least."""
        status, start = self._fleet.status(), time.perf_counter()
        found: list[RebalanceResult] = []
        failed: list[BaseException] = []
        mover = threading.Thread(target=self._rebalance, args=(found, failed))
        task = self._progress.add_task("serving while experts move", total=None)
        answers: list[tuple[int, tuple[int, ...]]] = []
        turn = 0
        while not turn or mover.is_alive():
            generations = self._submit(DURING, turn)
            if not turn:
                mover.start()
            for index, generation in enumerate(generations):
                self._progress.update(task, description=f"serving while experts move ({self._fleet.progress()})")
                answers.append(self._take(index, generation, task))
            turn += 1
        mover.join()
        if failed:
            raise failed[0]
        self._progress.update(task, description="served while experts moved", total=len(answers))
        return self._phase(answers, status, start), found[0]

    def _rebalance(self, found: list[RebalanceResult], failed: list[BaseException]) -> None:
        try:
            found.append(self._fleet.rebalance())
        except Exception as error:  # noqa: BLE001  (handed to the serving thread, which raises it)
            failed.append(error)

    def _submit(self, phase: int, turn: int) -> list[Generation]:
        first = phase * PHASE_STRIDE + turn * 10_000
        requests = [
            GenerationRequest(request=str(first + index), prompt=prompt.tokens, max_new_tokens=self._max_new_tokens)
            for index, prompt in enumerate(self._prompts)
        ]
        return self._fleet.submit(requests, self._homes)

    def _take(self, index: int, generation: Generation, task: Any) -> tuple[int, tuple[int, ...]]:
        tokens = generation.tokens()
        self._progress.advance(task)
        return index, tokens

    def _phase(self, answers: list[tuple[int, tuple[int, ...]]], before: list[WorkerStatus], start: float) -> Phase:
        seconds = time.perf_counter() - start
        after = self._fleet.status()

        def grown(part: str, name: str) -> float:
            totals = [float(sum(getattr(status, part)[name] for status in moment)) for moment in (before, after)]
            return totals[1] - totals[0]

        return Phase(
            answers=tuple(answers),
            seconds=seconds,
            lookups=int(grown("cache", "lookups")),
            hits=int(grown("cache", "hits")),
            record_s=grown("recorder", "record_s"),
        )


def check_texts(
    config: ClusterConfig, prompts: Sequence[Prompt], phases: Sequence[Phase], progress: Progress
) -> Verdict:
    """Every different answer of every prompt, against the plain model."""
    answers = sorted({answer for phase in phases for answer in phase.answers})
    task = progress.add_task("comparing with the plain model", total=len(answers))
    named = ((f"prompt {index}", prompts[index].tokens, tokens) for index, tokens in answers)
    return verify(config.worker_options(), named, lambda: progress.advance(task))


def score_served(trace_dir: Path, before: Plan, after: Plan, topology: Topology) -> tuple[Score, Score, RoutingTrace]:
    """Scores of the traffic that phases BEFORE and AFTER really carried, on the requests not fitted on."""
    trace = load_trace(trace_dir)
    _, judged = trace.split_by_request()
    parts = [judged.select(judged.request // PHASE_STRIDE == phase) for phase in (BEFORE, AFTER)]
    scores = [
        evaluate(plan.placement, topology, part, homes_of(part, topology.num_ranks, 0))
        for plan, part in zip((before, after), parts, strict=True)
    ]
    return scores[0], scores[1], parts[0]
