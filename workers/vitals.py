"""What a rank says of itself to those who keep it: what it holds when it has left, and signs of life."""

from __future__ import annotations

from dataclasses import dataclass

from placement.core import ExpertId


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a rank that has left its peers brings along: the epoch that it served, its experts, and room for them."""

    epoch: int
    experts: frozenset[ExpertId]
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A sign of life. serving: its engine runs. waiting: it waits for its peers; still_s: seconds since it last did
    anything with them. One that neither waits nor moves hangs. write_errors: of trace segments, so far.
    at: where in the program its step is, once it has been still for a while."""

    epoch: int
    serving: bool
    waiting: bool
    still_s: float
    error: str | None
    write_errors: int
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a rank says of itself: the epoch it serves, sizes, and counters since it started.

    tokens: that went through the model here; step_s: time of all steps; traffic: see `TrafficCounters`.
    """

    rank: int
    epoch: int
    alive: bool
    error: str | None
    steps: int
    experts: int
    host_slab_bytes: int
    slot_bytes: int
    cache: dict[str, float]
    recorder: dict[str, float]
    traffic: dict[str, float]
    tokens: int = 0
    step_s: float = 0.0
