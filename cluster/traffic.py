"""The traffic that a service decides on: the newest of what its ranks recorded, what came since the last decision, and
what that decision was made on.

The trace is the ranks' segments in one folder, numbered by rank. A mark holds the last number of each rank, so that
what came later can be told apart, even after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from placement.drift import MOST_TOKENS
from placement.errors import TraceError
from placement.files import write_whole
from placement.trace import UNKNOWN_RANK, RoutingTrace, concatenate, read_segment, segment_bytes

logger = logging.getLogger(__name__)

REFERENCE = "decided-on.safetensors"

Mark = dict[str, int]


class Traffic:
    """folder: where the ranks write segments. reference: where the traffic of the last decision is kept."""

    def __init__(self, folder: Path, reference: Path, *, window_tokens: int) -> None:
        self._folder = folder
        self._reference = reference
        self._window_tokens = window_tokens

    def mark(self) -> Mark:
        """Where the trace ends now: {rank's part of a segment's name: its last number}."""
        ends: Mark = {}
        for path in self._segments():
            rank, number = _parts(path)
            ends[rank] = max(number, ends.get(rank, -1))
        return ends

    def recent(self, since: Mark | None = None) -> RoutingTrace:
        """The newest segments of all ranks, those after the mark alone where one is given; at most window_tokens, or
        one segment a rank. Raises TraceError where there is nothing."""
        of_rank: dict[str, list[Path]] = {}
        for path in self._segments():
            rank, number = _parts(path)
            if number > (since or {}).get(rank, -1):
                of_rank.setdefault(rank, []).append(path)
        if not of_rank:
            what = "the folder has no *.safetensors segment"
            raise TraceError(f"trace '{self._folder}': {what + ' since the last decision' if since else what}")
        share = self._window_tokens // len(of_rank)
        newest = [trace for paths in of_rank.values() for trace in _newest(paths, share)]
        if not newest:
            raise TraceError(f"trace '{self._folder}': none of its segments can be read")
        return concatenate(newest, source=str(self._folder))

    def keep_reference(self, trace: RoutingTrace, seed: int) -> None:
        """Keep a sample of the traffic that a decision was made on, in place of the last one's, if there is room."""
        if trace.num_tokens > MOST_TOKENS:
            pick = np.random.default_rng(seed).choice(trace.num_tokens, MOST_TOKENS, replace=False)
            trace = trace.select(np.sort(pick))
        try:
            self._reference.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._reference, segment_bytes(trace))
        except OSError as error:
            logger.warning("what was decided on is not kept, so that drift is not seen: %s", error)

    def reference(self) -> RoutingTrace | None:
        """What the last decision was made on; None before the first. Raises TraceError where the file is broken."""
        return read_segment(self._reference) if self._reference.exists() else None

    def _segments(self) -> list[Path]:
        return sorted(self._folder.glob("rank*-*.safetensors"))


def as_ranks(trace: RoutingTrace, seats: Sequence[int]) -> RoutingTrace:
    """A trace that names seats, with the ranks instead: seats[rank]. A seat that is not taken is an unknown rank."""
    rank_of = np.full(max([*seats, int(trace.source_rank.max())]) + 2, UNKNOWN_RANK, np.int32)
    for rank, seat in enumerate(seats):
        rank_of[seat] = rank
    return replace(trace, source_rank=rank_of[trace.source_rank])


def _parts(path: Path) -> tuple[str, int]:
    rank, _, number = path.stem.rpartition("-")
    return rank, int(number) if number.isdecimal() else -1


def _newest(paths: list[Path], most_tokens: int) -> list[RoutingTrace]:
    """From the last segment back until there are enough tokens; those that are broken, or that the recorder deletes
    meanwhile, are left out."""
    newest: list[RoutingTrace] = []
    for path in reversed(paths):
        if sum(trace.num_tokens for trace in newest) >= most_tokens and newest:
            break
        try:
            newest.append(read_segment(path))
        except TraceError as error:
            if path.exists():
                logger.warning("a broken trace segment is skipped: %s", error)
    return newest[::-1]
