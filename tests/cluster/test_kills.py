"""Each component killed at each step of a migration: the old or the new epoch serves, never a mixture, and no expert is
lost. The steps are taken from a migration that goes through, so that a new step is killed at too."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest

from cluster.history import History, Member
from cluster.service import PlacementService
from placement.errors import MoetisError
from tests.cluster.local_ranks import MEMBERS, RANKS, LocalRanks, QuickService, Rank, blob_of, first_plan, new_service


class Killed(BaseException):
    """The service's process ends here."""


def _calls_of_a_migration() -> list[int]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = LocalRanks(first_plan().placement)
        service = new_service(folder, ranks, kind=QuickService)
        service.form(MEMBERS, "initial placement")
        ranks.calls.clear()
        assert service.rebalance().decision == "applied"
        return list(range(len(ranks.calls)))


STEPS = _calls_of_a_migration()


def _start(folder: Path) -> tuple[LocalRanks, PlacementService]:
    ranks = LocalRanks(first_plan().placement)
    service = new_service(folder, ranks, kind=QuickService)
    service.form(MEMBERS, "initial placement")
    ranks.calls.clear()
    return ranks, service


def _check(ranks: LocalRanks, service: PlacementService) -> None:
    """One epoch serves on every rank, each holds exactly its experts, and each of these is what it should be."""
    assert {rank.table.epoch for rank in ranks.ranks} == {service.current.placement.epoch}
    for number, rank in enumerate(ranks.ranks):
        assert rank.serving
        assert rank.slab.experts() == service.current.placement.experts_on(number)
        assert all(rank.slab.blob(expert).equal(blob_of(expert)) for expert in rank.slab.experts())
    assert all(len(served) == 1 for served in ranks.served)


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("step", STEPS)
def test_a_worker_killed_at_any_step_loses_no_expert(tmp_path: Path, step: int, victim: int) -> None:
    ranks, service = _start(tmp_path)
    name = MEMBERS[victim].actor

    def kill_at_step(method: str, rank: int) -> None:
        if len(ranks.calls) == step + 1 and name in ranks.actors:
            ranks.kill(name)

    ranks.on_call = kill_at_step
    with contextlib.suppress(MoetisError):
        service.rebalance()
    assert name not in ranks.actors
    left = [member for member in MEMBERS if member.actor != name]
    formed = service.form(left, "a rank was lost")
    assert formed.epoch == service.current.placement.epoch
    _check(ranks, service)
    # A replacement: an actor of another name, with what the first plan gives its seat.
    ranks.actors["new"] = Rank(victim, first_plan().placement)
    service.form([*left, Member(seat=victim, actor="new")], "it is back")
    assert service.current.placement.num_ranks == RANKS
    _check(ranks, service)
    assert History(tmp_path / "history.sqlite").unfinished() == []


@pytest.mark.parametrize("step", STEPS)
def test_a_service_killed_at_any_step_comes_back_with_the_epoch_that_serves(tmp_path: Path, step: int) -> None:
    ranks, service = _start(tmp_path)

    def kill_at_step(method: str, rank: int) -> None:
        if len(ranks.calls) == step + 1:
            raise Killed

    ranks.on_call = kill_at_step
    with pytest.raises(Killed):
        service.rebalance()
    ranks.on_call = lambda method, rank: None
    ranks.vote()
    again = new_service(tmp_path, ranks, kind=QuickService)
    again.resume()
    assert again.members == MEMBERS
    _check(ranks, again)
    assert History(tmp_path / "history.sqlite").unfinished() == []
    again.rebalance()
    _check(ranks, again)


def _calls_of_a_forming() -> list[int]:
    with tempfile.TemporaryDirectory() as name:
        ranks, service = _start(Path(name))
        ranks.kill(MEMBERS[1].actor)
        service.form([MEMBERS[0], *MEMBERS[2:]], "lost")
        return list(range(len(ranks.calls)))


@pytest.mark.parametrize("step", _calls_of_a_forming())
def test_a_service_killed_while_ranks_form_has_them_form_again(tmp_path: Path, step: int) -> None:
    ranks, service = _start(tmp_path)
    ranks.kill(MEMBERS[1].actor)
    left = [MEMBERS[0], *MEMBERS[2:]]

    def kill_at_step(method: str, rank: int) -> None:
        if len(ranks.calls) == step + 1:
            raise Killed

    ranks.on_call = kill_at_step
    with pytest.raises(Killed):
        service.form(left, "a rank was lost")
    ranks.on_call = lambda method, rank: None
    again = new_service(tmp_path, ranks, kind=QuickService)
    again.resume()
    again.form(left, "a rank was lost")
    _check(ranks, again)


def test_two_ranks_lost_at_once_and_then_one_more(tmp_path: Path) -> None:
    ranks, service = _start(tmp_path)
    ranks.kill(MEMBERS[0].actor)
    ranks.kill(MEMBERS[1].actor)
    service.form(MEMBERS[2:], "two were lost")
    _check(ranks, service)
    ranks.kill(MEMBERS[2].actor)
    service.form(MEMBERS[3:], "another was lost")
    assert service.current.placement.rows_per_rank == 8
    _check(ranks, service)


def test_a_drained_seat_holds_nothing_when_it_leaves(tmp_path: Path) -> None:
    ranks, service = _start(tmp_path)
    service.vacate([2])
    assert ranks.actors[MEMBERS[2].actor].slab.experts() == frozenset()
    ranks.calls.clear()
    formed = service.form([MEMBERS[0], MEMBERS[1], MEMBERS[3]], "drained")
    assert (formed.fetched, formed.restored) == (0, 0)
    _check(ranks, service)


def test_a_seat_that_was_drained_gets_experts_again_when_it_is_added(tmp_path: Path) -> None:
    ranks, service = _start(tmp_path)
    service.vacate([2])
    left = [MEMBERS[0], MEMBERS[1], MEMBERS[3]]
    service.form(left, "drained")
    ranks.actors["new"] = Rank(2, first_plan().placement)
    service.form([*left, Member(seat=2, actor="new")], "added")
    assert ranks.actors["new"].slab.experts()
    _check(ranks, service)


def test_ranks_that_come_back_get_the_placement_that_they_served(tmp_path: Path) -> None:
    ranks, service = _start(tmp_path)
    assert service.rebalance().decision == "applied"
    best = service.current.placement.physical_to_logical
    ranks.kill(MEMBERS[1].actor)
    left = [MEMBERS[0], *MEMBERS[2:]]
    service.form(left, "lost")
    ranks.actors["new"] = Rank(1, service.plan_for(range(RANKS)).placement)
    service.form([*left, Member(seat=1, actor="new")], "back")
    assert (service.current.placement.physical_to_logical == best).all()
    _check(ranks, service)


def test_a_network_that_broke_for_a_moment_moves_nothing(tmp_path: Path) -> None:
    _, service = _start(tmp_path)
    before = service.current.placement
    formed = service.form(MEMBERS, "the ranks broke off")
    assert (formed.fetched, formed.restored) == (0, 0)
    assert formed.epoch == before.epoch + 1
    assert (service.current.placement.physical_to_logical == before.physical_to_logical).all()
