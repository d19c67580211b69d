"""What to do with a plan, and the numbers that say so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from placement.report.measured import Interval, Measured
from placement.report.numbers import percent

# Below these a change is not worth its moves, or not worth a word: the service asks for the same 2% before it acts.
LEAST_GAIN, LEAST_LOAD_CHANGE = 0.02, 0.01
# An interval drawn from fewer requests than this is too narrow to be believed.
LEAST_REQUESTS = 8
UNSEEN = "on requests that the plan has not seen"


class Decision(StrEnum):
    APPLY = "apply"
    NOT_SURE = "not sure"
    LEAVE = "leave"
    NONE = "no verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    decision: Decision
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One figure before and after, both above zero."""

    before: float
    after: float

    @property
    def grown(self) -> float:
        """The share by which it grew; below zero where it fell."""
        return self.after / self.before - 1


def judge(measured: Measured) -> Verdict:
    """Apply where hops fall for certain and by more than load grows; leave where they do not fall; else not sure."""
    hops, load = _change(measured, "nodes_visited"), _change(measured, "load_max_over_mean")
    if hops is None:
        return _without_hops(measured, load)
    trust = measured.trust.get("after_over_before")
    decision, why = _decide(hops, load, trust)
    heading = {Decision.APPLY: "Apply", Decision.NOT_SURE: "Not sure", Decision.LEAVE: "Leave it"}[decision]
    facts = (
        f"{hops.before:.2f} to {hops.after:.2f} other nodes per token and layer ({percent(hops.grown)}{_ends(trust)})"
    )
    reason = f"{why}; {UNSEEN}" if why else UNSEEN
    return Verdict(decision=decision, text=f"{heading}: {reason}, {facts}. {_load_sentence(hops, load)}".strip())


def _change(measured: Measured, figure: str) -> _Change | None:
    before = measured.scores.get("before", {}).get(figure)
    after = measured.scores.get("after", {}).get(figure)
    return _Change(before=before, after=after) if before and after is not None else None


def _decide(hops: _Change, load: _Change | None, trust: Interval | None) -> tuple[Decision, str]:
    """The decision and, where it is not plain from the figures, why."""
    if hops.grown >= 0:
        if load is not None and load.grown < -LEAST_LOAD_CHANGE:
            return Decision.NOT_SURE, "it saves no hops, but it levels the load"
        return Decision.LEAVE, "it saves no hops"
    if trust is None:
        return Decision.NOT_SURE, "the plan does not say how far its figures can be trusted"
    if trust.high >= 1:
        return Decision.NOT_SURE, "the gain is within what chance could do; more requests would tell"
    if trust.requests is not None and trust.requests < LEAST_REQUESTS:
        return Decision.NOT_SURE, f"{trust.requests} held-out requests are too few to tell"
    if -hops.grown < LEAST_GAIN:
        return Decision.LEAVE, f"the gain is there, but below {LEAST_GAIN:.0%}: too little to move experts for"
    if load is not None and load.grown > max(LEAST_LOAD_CHANGE, -hops.grown):
        return Decision.NOT_SURE, "the load of the busiest rank grows by more than the hops shrink"
    return Decision.APPLY, ""


def _ends(trust: Interval | None) -> str:
    if trust is None:
        return ""
    return f", 95% interval {percent(trust.low - 1)} to {percent(trust.high - 1)}"


def _load_sentence(hops: _Change, load: _Change | None) -> str:
    if load is None:
        return ""
    facts = f"load max/mean {load.before:.2f} to {load.after:.2f} ({percent(load.grown)})"
    if load.grown <= LEAST_LOAD_CHANGE:
        return f"{facts[0].upper()}{facts[1:]}."
    trade = "Load balance gets worse while hops get fewer" if hops.grown < 0 else "Load balance gets worse"
    return f"{trade}: {facts}; the busiest rank sets the pace of every step."


def _without_hops(measured: Measured, load: _Change | None) -> Verdict:
    """Where there is nothing to visit before (one node), or no figures at all."""
    visited = measured.scores.get("before", {}).get("nodes_visited")
    if visited is None or load is None:
        text = "No verdict: this plan carries no figures from held-out requests that could be compared."
        return Verdict(decision=Decision.NONE, text=text)
    facts = f"{UNSEEN}, load max/mean {load.before:.2f} to {load.after:.2f} ({percent(load.grown)})"
    if measured.scores.get("after", {}).get("nodes_visited"):
        return Verdict(decision=Decision.LEAVE, text=f"Leave it: it adds hops where there were none; {facts}.")
    if load.grown >= -LEAST_LOAD_CHANGE:
        return Verdict(decision=Decision.LEAVE, text=f"Leave it: no hops between nodes to save; {facts}.")
    text = f"Not sure: no hops between nodes to save, and no interval for the load; {facts}."
    return Verdict(decision=Decision.NOT_SURE, text=text)
