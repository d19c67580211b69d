"""A history that can't be written: ranks form and serve all the same, and nothing is moved that is not stored."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cluster.history import History, Member
from cluster.service import PlacementService
from placement.errors import ConfigError
from placement.planfile import Plan
from tests.cluster.local_ranks import MEMBERS, LocalRanks, QuickService, Rank, first_plan, new_service


class FullHistory(History):
    """A history on a file system that is full once is_full is set: reads work, writes fail as SQLite has them fail."""

    is_full = False

    def _refuse(self) -> None:
        if self.is_full:
            error = sqlite3.OperationalError("database or disk is full")
            raise ConfigError(f"history: {error}")

    def add(self, *arguments: object, **named: object) -> None:
        self._refuse()
        super().add(*arguments, **named)  # type: ignore[arg-type]

    def advance(self, *arguments: object, **named: object) -> None:
        self._refuse()
        super().advance(*arguments, **named)  # type: ignore[arg-type]


def _start(folder: Path) -> tuple[LocalRanks, PlacementService, FullHistory]:
    ranks = LocalRanks(first_plan().placement)
    service = new_service(folder, ranks, kind=QuickService)
    history = FullHistory(folder / "history.sqlite")
    service._book.history = history
    service.form(MEMBERS, "initial placement")
    return ranks, service, history


def test_ranks_form_anew_though_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks, service, history = _start(tmp_path)
    history.is_full = True
    for lost in (1, 2):
        ranks.kill(MEMBERS[lost].actor)
        service.form([member for member in MEMBERS if member.actor in ranks.actors], "lost")
    assert {rank.table.epoch for rank in ranks.ranks} == {service.current.placement.epoch}
    assert "formed without being stored" in caplog.text
    ranks.actors["new"] = Rank(1, first_plan().placement)
    service.form([MEMBERS[0], Member(seat=1, actor="new"), MEMBERS[3]], "back")
    assert service.current.placement.num_ranks == 3


def test_no_expert_moves_that_the_history_does_not_know_of(tmp_path: Path) -> None:
    ranks, service, history = _start(tmp_path)
    history.is_full = True
    ranks.calls.clear()
    with pytest.raises(ConfigError, match="disk is full"):
        service.rebalance()
    assert all(method != "copy_round" for method, _ in ranks.calls)
    assert service.current.placement.epoch == 0


def test_a_disk_that_fills_up_on_the_way_leaves_the_old_epoch_serving(tmp_path: Path) -> None:
    ranks, service, history = _start(tmp_path)

    def fill_up(method: str, rank: int) -> None:
        history.is_full = history.is_full or method == "prepare"

    ranks.on_call = fill_up
    result = service.rebalance()
    assert result.decision == "aborted"
    assert {rank.table.epoch for rank in ranks.ranks} == {0}
    history.is_full = False
    ranks.on_call = lambda method, rank: None
    assert service.rebalance().decision == "applied"


def test_a_history_that_can_not_be_read_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").write_bytes(b"no database at all, but long enough to be taken for one" * 20)
    with pytest.raises(ConfigError, match="move it away to start a new one"):
        History(tmp_path / "history.sqlite").next_epoch()


def test_a_plan_is_kept_whole(tmp_path: Path) -> None:
    history = History(tmp_path / "history.sqlite")
    plan: Plan = first_plan()
    history.add(plan, members=MEMBERS)
    assert history.members(plan.placement.epoch) == MEMBERS
    assert (history.plan(0).placement.physical_to_logical == plan.placement.physical_to_logical).all()
