"""The history for people and machines: of each plan what was promised, decided, moved and measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from cluster.config import ClusterConfig, history_path
from cluster.history import DONE, MEASURED, History, HistoryEvent, PlanRecord
from placement.errors import ConfigError
from placement.planfile import Plan

_SHORT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLife:
    """A stored plan and the events of its life, in order."""

    record: PlanRecord
    events: tuple[HistoryEvent, ...]

    @property
    def plan(self) -> Plan:
        return self.record.plan

    def detail(self, state: str) -> dict[str, Any]:
        """What was noted with the last event of a state; empty where there was none."""
        return next((event.detail for event in reversed(self.events) if event.state == state), {})

    @property
    def reason(self) -> str | None:
        reasons = [event.detail["reason"] for event in self.events if "reason" in event.detail]
        return str(reasons[-1]) if reasons else None

    def to_dict(self) -> dict[str, Any]:
        """One object of `moetis history --json`."""
        done = self.detail(DONE)
        moved = {key: done[key] for key in ("moves", "rounds", "bytes", "plan_s", "copy_s", "switch_s") if key in done}
        return {
            "epoch": self.record.epoch,
            "state": self.record.state,
            "created": self.record.created,
            "reason": self.reason,
            "predicted": self.plan.measured or None,
            "migration": moved or None,
            "measured": self.detail(MEASURED) or None,
            "events": [asdict(event) for event in self.events],
        }


def read_lives(config: ClusterConfig, epoch: int | None = None) -> list[PlanLife]:
    """All plans of a cluster, or one. Raises ConfigError where there is no history, or no such epoch."""
    path = history_path(config)
    if not path.is_file():
        raise ConfigError(f"history '{path}': no such file; a cluster with run_dir '{config.run_dir}' has never served")
    history = History(path)
    events = history.events()
    lives = [
        PlanLife(record=record, events=tuple(event for event in events if event.epoch == record.epoch))
        for record in history.plans()
    ]
    if epoch is None:
        return lives
    one = [life for life in lives if life.record.epoch == epoch]
    if not one:
        known = ", ".join(str(life.record.epoch) for life in lives[-_SHORT:])
        raise ConfigError(f"history '{path}': no epoch {epoch}; the last are {known or 'none'}")
    return one


def lives_table(lives: list[PlanLife], *, events: bool) -> RenderableType:
    """One row a plan; below it, where asked for, every event."""
    table = Table(
        caption="other nodes visited per token and layer: promised on held-out requests; measured on the traffic since "
        "the switch, replayed under the plan before and under this one",
        caption_justify="left",
    )
    for name in ("epoch", "stored (UTC)", "state", "promised", "moved", "measured", "why"):
        table.add_column(name, overflow="fold")
    for life in lives:
        table.add_row(
            str(life.record.epoch),
            life.record.created[:19].replace("T", " "),
            life.record.state,
            _change(life.plan.measured),
            _moved(life.detail(DONE)),
            _change(life.detail(MEASURED)),
            life.reason or "",
        )
    return Group(table, *(_events_table(life) for life in lives)) if events else table


def _change(scores: dict[str, Any]) -> str:
    """`0.90 -> 0.68 (-24%)` from scores before and after; what there is of them."""
    before, after = ((scores.get(key) or {}).get("nodes_visited") for key in ("before", "after"))
    if after is None:
        return ""
    if before is None:
        return f"{after:.3f}"
    return f"{before:.3f} -> {after:.3f}" + (f" ({after / before - 1:+.0%})" if before else "")


def _moved(done: dict[str, Any]) -> str:
    if "moves" not in done:
        return ""
    return f"{done['moves']} experts, {done['bytes'] / 1e6:.1f} MB, {done['copy_s']:.2f} s"


def _events_table(life: PlanLife) -> Table:
    table = Table(title=f"epoch {life.record.epoch}", title_justify="left")
    for name in ("at (UTC)", "state", "detail"):
        table.add_column(name, overflow="fold")
    for event in life.events:
        told = {key: value for key, value in event.detail.items() if key != "mark" and not isinstance(value, dict)}
        table.add_row(event.at[:23].replace("T", " "), event.state, ", ".join(f"{k}: {v}" for k, v in told.items()))
    return table
