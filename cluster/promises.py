"""What became of a cluster's past plans: read from its history, for reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster import history as states
from cluster.history import History, HistoryEvent
from placement.errors import ConfigError
from placement.report import PastEpoch
from placement.report.measured import Measured, read_measured

MOST_EPOCHS = 100


def past_epochs(path: Path) -> tuple[PastEpoch, ...]:
    """The newest plans of a history, oldest first. Raises ConfigError where it can't be read.

    What a plan was found to do is what was measured of it once it served, if that was noted; else what the next plan
    after it measured of the placement in force, on later traffic, on requests that plan was not fitted on.
    """
    if not path.is_file():
        raise ConfigError(f"--history '{path}': no such file; a cluster keeps it in its run_dir as history.sqlite")
    history = History(path)
    lives: dict[int, list[HistoryEvent]] = {}
    for event in history.events():
        lives.setdefault(event.epoch, []).append(event)
    measured = {epoch: read_measured(history.plan(epoch).measured) for epoch in lives}
    found = _found_later(history.events(), measured)
    return tuple(_past(epoch, life, measured[epoch], found.get(epoch)) for epoch, life in lives.items())[-MOST_EPOCHS:]


def _found_later(events: list[HistoryEvent], measured: dict[int, Measured]) -> dict[int, float]:
    """Other nodes visited under each epoch that served, as the first plan made in its time measured them."""
    found: dict[int, float] = {}
    serving: int | None = None
    for event in events:
        nodes = measured[event.epoch].scores.get("before", {}).get("nodes_visited")
        if serving is not None and event.epoch > serving and nodes is not None:
            found.setdefault(serving, nodes)
        if event.state in (states.SERVING, states.DONE):
            serving = event.epoch
    return found


def _past(epoch: int, life: list[HistoryEvent], measured: Measured, found: float | None) -> PastEpoch:
    last = life[-1]
    served = any(event.state in (states.SERVING, states.DONE) for event in life)
    before = measured.scores.get("before", {}).get("nodes_visited")
    trust = measured.trust.get("after_over_before")
    effects = [event.detail for event in life if event.state == states.MEASURED]
    after, old = (_nodes(effects[-1].get(name)) if effects else None for name in ("after", "before"))
    reasons = [str(event.detail["reason"]) for event in life if "reason" in event.detail]
    return PastEpoch(
        epoch=epoch,
        at=life[0].at,
        state="served" if served else last.state,
        reason=reasons[-1] if reasons else "",
        before=before,
        promised=measured.scores.get("after", {}).get("nodes_visited"),
        most=None if trust is None or before is None else before * trust.high,
        found=after if after is not None else found if served else None,
        found_before=old if after is not None else None,
    )


def _nodes(score: Any) -> float | None:
    """nodes_visited of a score as it lies in a history, whoever wrote it."""
    value = score.get("nodes_visited") if isinstance(score, dict) else None
    return float(value) if isinstance(value, int | float) else None
