"""The metrics of a serving cluster: their names, and what they are worth, from what ranks say of themselves and from
the history. Ray exports them (as `ray_NAME`) where Prometheus looks.

Few series on purpose: no metric is labelled by rank, layer or expert. A rank that stands out shows in the imbalance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster import history as states
from cluster.history import HistoryEvent
from workers.vitals import WorkerStatus

GAUGES = {
    "moetis_tokens_per_second": "Tokens that went through the model, prompts included, over all ranks",
    "moetis_step_seconds": "Mean time of a step, idle steps left out",
    "moetis_load_imbalance": "Largest over mean (token, expert) pairs of a rank",
    "moetis_nodes_visited_per_token": "Other nodes that a token visits in a layer",
    "moetis_ranks_visited_per_token": "Other ranks that a token visits in a layer",
    "moetis_cache_hit_ratio": "Lookups of the expert cache that found the expert in a slot",
    "moetis_cache_alarm": "Worst rank's expert cache: 0 fine, 1 under 80% of lookups hit for long, 2 under 50%",
    "moetis_prefetch_precision": "Experts that were fetched ahead and then used, of all that were fetched ahead",
    "moetis_prefetch_coverage": "Experts that were missing and fetched ahead in time, of all that were missing",
    "moetis_prefetch_wasted_bytes": "Bytes that were fetched ahead and not used, since the ranks started",
    "moetis_memory_reliefs": "Times that expert caches made room because memory was short, since the ranks started",
    "moetis_stall_share": "Share of the time that computing waited for copies of experts",
    "moetis_epoch": "The epoch that all ranks serve; the lowest where they differ",
    "moetis_epoch_spread": "Difference between the highest and the lowest epoch that ranks serve",
    "moetis_ranks_alive": "Ranks that answer and serve",
    "moetis_recorder_lost_tokens": "Recorded tokens that were dropped, since the ranks started",
    "moetis_drift_distance": "Jensen-Shannon distance of the traffic since the last decision, by what",
    "moetis_drift_floor": "What chance explains of that distance, by what",
    "moetis_decisions": "Plans in the history, by decision: applied, left, aborted, under_way",
    "moetis_migrated_bytes": "Bytes of weights that all migrations copied",
    "moetis_migration_seconds": "Time that the last migration copied",
    "moetis_switch_seconds": "Time from commit to the new epoch on every rank, of the last migration",
    "moetis_migration_under_way_seconds": "Age of a migration that has neither ended nor failed; 0 if there is none",
    "moetis_promise_kept_ratio": "Other-node visits after over before of the last plan: measured over promised",
}
LABELS = {"moetis_drift_distance": "what", "moetis_drift_floor": "what", "moetis_decisions": "decision"}

# (metric, value of its label or "")
Readings = dict[tuple[str, str], float]

_DECISIONS = {states.DONE: "applied", states.SERVING: "applied", states.LEFT: "left", states.ABORTED: "aborted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What all ranks said at a moment, seconds by a clock that does not jump."""

    at_s: float
    statuses: tuple[WorkerStatus, ...]


def rank_readings(before: Sample | None, now: Sample) -> Readings:
    """Metrics of the ranks between two samples; what needs a difference is left out where there is none."""
    epochs = [status.epoch for status in now.statuses]
    readings: Readings = {
        ("moetis_ranks_alive", ""): float(sum(status.alive for status in now.statuses)),
        ("moetis_recorder_lost_tokens", ""): _sum(now, "recorder", "tokens_dropped"),
        ("moetis_prefetch_wasted_bytes", ""): _sum(now, "cache", "prefetch_wasted_bytes"),
        ("moetis_memory_reliefs", ""): _sum(now, "cache", "reliefs"),
        ("moetis_cache_alarm", ""): max((status.cache.get("alarm", 0.0) for status in now.statuses), default=0.0),
    }
    if epochs:
        readings["moetis_epoch", ""] = float(min(epochs))
        readings["moetis_epoch_spread", ""] = float(max(epochs) - min(epochs))
    if before is None or not _comparable(before, now):
        return readings
    elapsed = now.at_s - before.at_s

    def more(part: str, key: str) -> float:
        return _sum(now, part, key) - _sum(before, part, key)

    steps = sum(status.steps for status in now.statuses) - sum(status.steps for status in before.statuses)
    step_s = sum(status.step_s for status in now.statuses) - sum(status.step_s for status in before.statuses)
    tokens = more("traffic", "tokens")
    lookups = more("cache", "lookups")
    served = sum(status.tokens for status in now.statuses) - sum(status.tokens for status in before.statuses)
    readings["moetis_tokens_per_second", ""] = served / elapsed
    readings["moetis_stall_share", ""] = more("cache", "stall_s") / (elapsed * len(now.statuses))
    if steps:
        readings["moetis_step_seconds", ""] = step_s / steps
    if tokens:
        readings["moetis_nodes_visited_per_token", ""] = more("traffic", "nodes_visited") / tokens
        readings["moetis_ranks_visited_per_token", ""] = more("traffic", "ranks_visited") / tokens
    pairs = [new - old for new, old in zip(_pairs(now), _pairs(before), strict=True)]
    if sum(pairs):
        readings["moetis_load_imbalance", ""] = max(pairs) * len(pairs) / sum(pairs)
    if lookups:
        readings["moetis_cache_hit_ratio", ""] = more("cache", "hits") / lookups
    foreseen, used = more("cache", "prefetched"), more("cache", "prefetch_used")
    if foreseen > 0:
        readings["moetis_prefetch_precision", ""] = min(1.0, used / foreseen)
        missing = used + more("cache", "copies") - foreseen
        readings["moetis_prefetch_coverage", ""] = used / missing if missing > 0 else 1.0
    return readings


def _sum(sample: Sample, part: str, key: str) -> float:
    return float(sum(getattr(status, part).get(key, 0) for status in sample.statuses))


def _pairs(sample: Sample) -> list[float]:
    """(token, expert) pairs that each rank computed."""
    return [status.traffic["pairs"] for status in sample.statuses]


def _comparable(before: Sample, now: Sample) -> bool:
    """Whether the same ranks count on: not after one was replaced, or ranks were added or drained."""
    pairs = list(zip(_pairs(before), _pairs(now), strict=False))
    same = len(before.statuses) == len(now.statuses) > 0
    return now.at_s > before.at_s and same and all(old <= new for old, new in pairs)


def history_readings(events: Sequence[HistoryEvent], seconds_since: dict[int, float]) -> Readings:
    """Metrics of plans and migrations. seconds_since: the age of each epoch's last event."""
    last: dict[int, HistoryEvent] = {}
    promised: float | None = None
    readings: Readings = {(name, ""): 0.0 for name in ("moetis_migrated_bytes", "moetis_migration_under_way_seconds")}
    for event in events:
        detail = event.detail
        if event.state in (states.MEASURED, states.DRIFT):
            if event.state == states.DRIFT and detail.get("drift"):
                readings |= _drift_readings(detail["drift"])
            elif detail.get("promised") and detail.get("after_over_before"):
                promised = detail["promised"]["ratio"]
                readings["moetis_promise_kept_ratio", ""] = detail["after_over_before"]["ratio"] / max(promised, 1e-9)
            continue
        last[event.epoch] = event
        if event.state == states.DONE and "bytes" in detail:
            readings["moetis_migrated_bytes", ""] += float(detail["bytes"])
            readings["moetis_migration_seconds", ""] = float(detail["copy_s"])
            readings["moetis_switch_seconds", ""] = float(detail["switch_s"])
    newest = max(last, default=-1)
    # What was under way when something newer came is over.
    unsettled = {epoch: "under_way" if epoch == newest else "aborted" for epoch in last}
    decided = Counter(_DECISIONS.get(event.state, unsettled[epoch]) for epoch, event in last.items())
    for decision in ("applied", "left", "aborted", "under_way"):
        readings["moetis_decisions", decision] = float(decided[decision])
    if decided["under_way"]:
        readings["moetis_migration_under_way_seconds", ""] = seconds_since.get(newest, 0.0)
    return readings


def _drift_readings(drift: dict[str, Any]) -> Readings:
    return {
        (name, what): float(drift[what][key])
        for name, key in (("moetis_drift_distance", "distance"), ("moetis_drift_floor", "floor"))
        for what in ("load", "affinity")
    }
