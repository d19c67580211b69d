"""What to do with a plan (apply, apply partly, leave), and the numbers that say so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from placement.report.measured import Interval, Measured
from placement.report.numbers import number_ranges, percent
from placement.report.partly import Part

# Below these a change is not worth its moves, or not worth a word: the service asks for the same 2% before it acts.
LEAST_GAIN, LEAST_LOAD_CHANGE = 0.02, 0.01
# Where no hop is saved, the load must fall by this much: its figure has no interval.
LEAST_LOAD_GAIN = 0.05
# An interval drawn from fewer requests than this is too narrow to be believed.
LEAST_REQUESTS = 8
UNSEEN = "on requests that the plan has not seen"
NO_FIGURES = "No verdict: this plan carries no figures from held-out requests that could be compared."


class Decision(StrEnum):
    APPLY = "apply"
    PARTLY = "apply partly"
    LEAVE = "leave"
    NONE = "no verdict"


HEADINGS = {
    Decision.APPLY: "Apply",
    Decision.PARTLY: "Apply partly",
    Decision.LEAVE: "Leave it",
    Decision.NONE: "No verdict",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """decision, and the sentences that give the reason and the numbers; they begin with the decision."""

    decision: Decision
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One figure before and after; before is above zero."""

    before: float
    after: float

    @property
    def grown(self) -> float:
        """The share by which it grew; below zero where it fell."""
        return self.after / self.before - 1


def judge(measured: Measured, part: Part | None = None) -> Verdict:
    """Apply where hops fall for certain and by more than load grows, or where load alone falls much; else leave.

    part: of the plan, that brings nearly all of what it gains: then only that is to be applied.
    """
    hops, load = _change(measured, "nodes_visited"), _change(measured, "load_max_over_mean")
    if hops is None:
        return _without_hops(measured, load)
    trust = measured.trust.get("after_over_before")
    decision, why = _decide(hops, load, trust)
    if decision is Decision.APPLY and part is not None and hops.grown < 0:
        decision, why = Decision.PARTLY, _part_in_words(part)
    facts = (
        f"{hops.before:.2f} to {hops.after:.2f} other nodes per token and layer ({percent(hops.grown)}{_ends(trust)})"
    )
    reason = f"{why}; {UNSEEN}" if why else UNSEEN
    text = f"{HEADINGS[decision]}: {reason}, {facts}. {_load_sentence(hops, load)}"
    return Verdict(decision=decision, text=text.strip())


def _change(measured: Measured, figure: str) -> _Change | None:
    before = measured.scores.get("before", {}).get(figure)
    after = measured.scores.get("after", {}).get(figure)
    return _Change(before=before, after=after) if before and after is not None else None


def _decide(hops: _Change, load: _Change | None, trust: Interval | None) -> tuple[Decision, str]:
    """The decision and, where it is not plain from the figures, why."""
    if hops.grown >= 0:
        if hops.grown < LEAST_GAIN and load is not None and load.grown <= -LEAST_LOAD_GAIN:
            return Decision.APPLY, "it saves no hops, but it levels the load"
        return Decision.LEAVE, "it saves no hops"
    if trust is None:
        return Decision.LEAVE, "the plan does not say how far its figures can be trusted"
    if trust.high >= 1:
        return Decision.LEAVE, "the gain is within what chance could do; more requests would tell"
    if trust.requests is not None and trust.requests < LEAST_REQUESTS:
        return Decision.LEAVE, f"{trust.requests} held-out requests are too few to tell; record more"
    if -hops.grown < LEAST_GAIN:
        return Decision.LEAVE, f"the gain is there, but below {LEAST_GAIN:.0%}: too little to move experts for"
    if load is not None and load.grown > max(LEAST_LOAD_CHANGE, -hops.grown):
        return Decision.LEAVE, "the load of the busiest rank grows by more than the hops shrink"
    return Decision.APPLY, ""


def _part_in_words(part: Part) -> str:
    many = len(part.layers) > 1
    layers = f"{'layers' if many else 'layer'} {number_ranges(part.layers)} {'bring' if many else 'brings'}"
    return f"{layers} {part.saving:.0%} of the saving for {part.copies:.0%} of the copies; of the whole plan"


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
    """Where there is nothing to visit before (one node), no hops are known (counts alone), or no figures at all."""
    if load is None:
        return Verdict(decision=Decision.NONE, text=NO_FIGURES)
    known = measured.scores.get("before", {}).get("nodes_visited") is not None
    seen = UNSEEN if known else "on the counts that it was made from"
    facts = f"{seen}, load max/mean {load.before:.2f} to {load.after:.2f} ({percent(load.grown)})"
    if measured.scores.get("after", {}).get("nodes_visited") and known:
        return Verdict(decision=Decision.LEAVE, text=f"Leave it: it adds hops where there were none; {facts}.")
    hops = "there are no hops between nodes to save" if known else "hops are not known"
    if load.grown <= -LEAST_LOAD_GAIN:
        return Verdict(decision=Decision.APPLY, text=f"Apply: {hops}, and it levels the load; {facts}.")
    return Verdict(decision=Decision.LEAVE, text=f"Leave it: {hops}, and the load hardly changes; {facts}.")
