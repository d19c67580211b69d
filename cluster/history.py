"""The history: plans, epochs and what became of them, in SQLite, written before anything is enacted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.errors import ConfigError
from placement.planfile import Plan, plan_from_json, plan_to_json

FORMING, PLANNED, COPYING, PREPARED, COMMITTING, SERVING, DONE = (
    "forming",
    "planned",
    "copying",
    "prepared",
    "committing",
    "serving",
    "done",
)
ABORTED, LEFT = "aborted", "left"
MEASURED, DRIFT = "measured", "drift"
UNFINISHED = (FORMING, PLANNED, COPYING, PREPARED, COMMITTING, SERVING)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS plans (
    epoch INTEGER PRIMARY KEY, state TEXT NOT NULL, plan TEXT NOT NULL,
    created TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')));
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL REFERENCES plans(epoch), state TEXT NOT NULL, detail TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')));
CREATE TABLE IF NOT EXISTS members (
    epoch INTEGER NOT NULL, seat INTEGER NOT NULL, actor TEXT NOT NULL, PRIMARY KEY (epoch, seat));
CREATE TABLE IF NOT EXISTS wanted (seat INTEGER PRIMARY KEY);
"""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Member:
    """A seat of the configured topology, and the actor that has taken it."""

    seat: int
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEvent:
    """One step in the life of a plan. at is UTC, ISO 8601."""

    epoch: int
    state: str
    detail: dict[str, Any]
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """A plan, the state that it came to, and when it was stored (UTC, ISO 8601)."""

    epoch: int
    state: str
    created: str
    plan: Plan


class History:
    """One file; every write is a transaction that is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with self._connection() as connection:
            connection.executescript(_SCHEMA)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self._path, timeout=30)
        except sqlite3.OperationalError as error:
            raise ConfigError(f"history '{self._path}': cannot be opened: {error}") from error
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            with connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"history '{self._path}': {error}; move it away to start a new one") from error
        finally:
            connection.close()

    def add(
        self,
        plan: Plan,
        state: str = PLANNED,
        detail: dict[str, Any] | None = None,
        members: Sequence[Member] = (),
    ) -> None:
        """Store a plan under its epoch, which must be new, and who is to serve it."""
        epoch = plan.placement.epoch
        with self._connection() as connection:
            connection.execute(
                "INSERT INTO plans (epoch, state, plan) VALUES (?, ?, ?)", (epoch, state, plan_to_json(plan))
            )
            _insert_members(connection, epoch, members)
            _insert_event(connection, epoch, state, detail)

    def add_again(self, epoch: int, state: str, detail: dict[str, Any], members: Sequence[Member]) -> None:
        """A stored plan is taken up by other members."""
        with self._connection() as connection:
            connection.execute("UPDATE plans SET state = ? WHERE epoch = ?", (state, epoch))
            connection.execute("DELETE FROM members WHERE epoch = ?", (epoch,))
            _insert_members(connection, epoch, members)
            _insert_event(connection, epoch, state, detail)

    def advance(self, epoch: int, state: str, detail: dict[str, Any] | None = None) -> None:
        """Note that a plan has come to a state."""
        with self._connection() as connection:
            connection.execute("UPDATE plans SET state = ? WHERE epoch = ?", (state, epoch))
            _insert_event(connection, epoch, state, detail)

    @property
    def path(self) -> Path:
        return self._path

    def note(self, epoch: int, what: str, detail: dict[str, Any]) -> None:
        """Note what was MEASURED of a plan, or the last DRIFT, in place of what was noted before; its state stays."""
        with self._connection() as connection:
            connection.execute("DELETE FROM events WHERE epoch = ? AND state = ?", (epoch, what))
            _insert_event(connection, epoch, what, detail)

    def mark_of(self, epoch: int) -> dict[str, int] | None:
        """Where the trace ended when a plan came to serve; None where that was not noted."""
        mark: dict[str, int] | None = self._last_detail("mark", "epoch = ? AND state = ?", (epoch, DONE))
        return mark

    def last_mark(self) -> dict[str, int] | None:
        """Where the trace ended at the last decision, enacted or left."""
        mark: dict[str, int] | None = self._last_detail("mark", "state IN (?, ?)", (DONE, LEFT))
        return mark

    def base_of(self, epoch: int) -> int | None:
        """The epoch that a plan was made to replace."""
        base: int | None = self._last_detail("base", "epoch = ? AND state = ?", (epoch, PLANNED))
        return base

    def _last_detail(self, key: str, condition: str, values: tuple[Any, ...]) -> Any:
        with self._connection() as connection:
            row = connection.execute(
                f"SELECT detail FROM events WHERE {condition} ORDER BY id DESC LIMIT 1", values
            ).fetchone()
        return None if row is None else json.loads(row[0]).get(key)

    def plans(self) -> list[PlanRecord]:
        """Every plan that was ever stored, by epoch."""
        with self._connection() as connection:
            rows = connection.execute("SELECT epoch, state, created, plan FROM plans ORDER BY epoch").fetchall()
        return [
            PlanRecord(
                epoch=epoch,
                state=state,
                created=created,
                plan=plan_from_json(text, source=f"{self._path}: epoch {epoch}"),
            )
            for epoch, state, created, text in rows
        ]

    def next_epoch(self) -> int:
        """An epoch that no plan has used, not even one that was aborted."""
        with self._connection() as connection:
            (largest,) = connection.execute("SELECT MAX(epoch) FROM plans").fetchone()
        return 0 if largest is None else int(largest) + 1

    def plan(self, epoch: int) -> Plan:
        with self._connection() as connection:
            (text,) = connection.execute("SELECT plan FROM plans WHERE epoch = ?", (epoch,)).fetchone()
        return plan_from_json(text, source=f"{self._path}: epoch {epoch}")

    def served(self, fits: Callable[[Plan, tuple[int, ...]], bool] = lambda plan, seats: True) -> Plan | None:
        """The newest plan that came to serve, if any; fits is told each with the seats that served it."""
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT epoch FROM plans WHERE state IN (?, ?) ORDER BY epoch DESC", (SERVING, DONE)
            ).fetchall()
        for (epoch,) in rows:
            plan = self.plan(int(epoch))
            if fits(plan, tuple(member.seat for member in self.members(int(epoch)))):
                return plan
        return None

    def members(self, epoch: int) -> tuple[Member, ...]:
        """Who served an epoch, in the order of their ranks."""
        with self._connection() as connection:
            rows = connection.execute("SELECT seat, actor FROM members WHERE epoch = ? ORDER BY seat", (epoch,))
            return tuple(Member(seat=seat, actor=actor) for seat, actor in rows)

    def unfinished(self) -> list[tuple[int, str]]:
        """(epoch, state) of the plans that were begun and came to no end, oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT epoch, state FROM plans WHERE state IN ({marks}) ORDER BY epoch", UNFINISHED
            )
            return [(int(epoch), str(state)) for epoch, state in rows]

    def want(self, seats: Sequence[int]) -> None:
        """Store which seats are to be taken."""
        with self._connection() as connection:
            connection.execute("DELETE FROM wanted")
            connection.executemany("INSERT INTO wanted (seat) VALUES (?)", [(seat,) for seat in seats])

    def wanted(self) -> tuple[int, ...]:
        """The seats that are to be taken, empty where nobody has said."""
        with self._connection() as connection:
            return tuple(int(seat) for (seat,) in connection.execute("SELECT seat FROM wanted ORDER BY seat"))

    def events(self) -> list[HistoryEvent]:
        with self._connection() as connection:
            rows = connection.execute("SELECT epoch, state, detail, at FROM events ORDER BY id").fetchall()
        return [
            HistoryEvent(epoch=epoch, state=state, detail=json.loads(detail), at=at)
            for epoch, state, detail, at in rows
        ]


def _insert_members(connection: sqlite3.Connection, epoch: int, members: Sequence[Member]) -> None:
    connection.executemany(
        "INSERT INTO members (epoch, seat, actor) VALUES (?, ?, ?)",
        [(epoch, member.seat, member.actor) for member in members],
    )


def _insert_event(connection: sqlite3.Connection, epoch: int, state: str, detail: dict[str, Any] | None) -> None:
    connection.execute(
        "INSERT INTO events (epoch, state, detail) VALUES (?, ?, ?)", (epoch, state, json.dumps(detail or {}))
    )
