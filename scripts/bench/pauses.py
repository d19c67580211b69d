"""Pauses of a stream: between two tokens, as a client sees them, by what went on meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from served import Told

from cluster.gateway.text_stream import TextStream

QUIET, PLANNING, MOVING, KILLED = "quiet", "the service plans", "experts move", "a worker was killed"
KINDS = (QUIET, PLANNING, MOVING, KILLED)


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when something went on, by time.monotonic()."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Between two moments that follow each other. tokens: how many had to come for what came at the end of it."""

    kind: str
    seconds: float
    tokens: int = 1

    @property
    def for_a_token(self) -> float:
        return self.seconds / self.tokens


def pauses(moments: list[float], spans: list[Span], due: Sequence[int] | None = None) -> list[Pause]:
    """Of each, the worst that went on meanwhile. due: the tokens of what came at each moment, one each unless given."""
    found = []
    for number, (before, after) in enumerate(pairwise(moments), start=1):
        kinds = {span.kind for span in spans if before < span.end and after > span.start}
        kind = next((kind for kind in (KILLED, MOVING, PLANNING) if kind in kinds), QUIET)
        found.append(Pause(kind, after - before, 1 if due is None else due[number]))
    return found


def tokens_due(told: Told, tokens: Sequence[int], tokenizer: Any) -> list[int]:
    """For each piece that a client got, the tokens that its first character took. Later ones of the same piece have
    waited somewhere on their way, which is no excuse."""
    stream, waiting, shown = TextStream(tokenizer), 0, ""
    first_at: dict[int, int] = {}
    for token in tokens:
        waiting += 1
        if more := stream.feed(token):
            first_at[len(shown)] = waiting
            shown, waiting = shown + more, 0
    first_at[len(shown)] = max(1, waiting)
    begins = itertools.accumulate((len(piece) for piece in told.pieces[:-1]), initial=0)
    return [first_at.get(begin, 1) for begin in begins]


def summary(found: list[Pause], at_workers: list[Pause], step_s: float) -> dict[str, float]:
    if not found:
        return {"pauses": 0}
    for_a_token = sorted(pause.for_a_token for pause in found)
    figures = {
        "pauses": len(found),
        "longest_s": for_a_token[-1],
        "p99_s": for_a_token[int(0.99 * (len(found) - 1))],
        "longest_steps": for_a_token[-1] / step_s,
        "longest_piece_s": max(pause.seconds for pause in found),
    }
    return figures | ({"longest_at_workers_s": max(pause.seconds for pause in at_workers)} if at_workers else {})


def of_kind(found: list[Pause], kind: str) -> list[Pause]:
    return [pause for pause in found if pause.kind == kind]
