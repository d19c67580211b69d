"""The placement service against ranks that keep real epochs, with a fault put at every step of a migration."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster import history as states
from cluster.gate import gate, gate_levelled
from cluster.history import History
from cluster.service import PlacementService
from placement.errors import MigrationError, MoetisError
from placement.replan import num_copies_between
from tests.cluster.local_ranks import MEMBERS, RANKS, LocalRanks, Rank, first_plan, new_service, write_trace


def make_service(folder: Path, ranks: LocalRanks, min_gain: float = 0.01) -> PlacementService:
    """A service whose ranks serve."""
    service = new_service(folder, ranks, min_gain)
    service.form(MEMBERS, "initial placement")
    return service


def make_ranks(fault: tuple[str, int] | None = None) -> LocalRanks:
    return LocalRanks(first_plan().placement, fault)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(tmp_path)
    return tmp_path


def test_a_plan_that_pays_is_enacted_on_every_rank(folder: Path) -> None:
    ranks = make_ranks()
    service = make_service(folder, ranks)
    result = service.rebalance()
    assert result.decision == "applied"
    assert service.current.placement.epoch == 1
    for number, rank in enumerate(ranks.ranks):
        assert rank.slab.experts() == result.plan.placement.experts_on(number)


def test_the_plan_is_stored_before_anything_is_copied(folder: Path) -> None:
    make_service(folder, make_ranks()).rebalance()
    told = [event.state for event in History(folder / "history.sqlite").events() if event.epoch == 1]
    assert told[0] == states.PLANNED
    assert told[1] == states.COPYING
    assert told[-4:] == [states.PREPARED, states.COMMITTING, states.SERVING, states.DONE]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("method", ["copy_round", "prepare", "commit"])
def test_a_fault_before_the_switch_leaves_the_old_epoch_serving_everywhere(
    folder: Path, method: str, rank: int
) -> None:
    ranks = make_ranks((method, rank))
    service = make_service(folder, ranks)
    result = service.rebalance()
    assert result.decision == "aborted"
    assert f"{method}: rank {rank} does not answer" in result.reason
    assert service.current.placement.epoch == 0
    assert all(served == {0} for served in ranks.served)
    for number, each in enumerate(ranks.ranks):
        assert each.slab.experts() == service.current.placement.experts_on(number)


def test_after_an_aborted_migration_the_next_one_gets_an_epoch_of_its_own(folder: Path) -> None:
    service = make_service(folder, make_ranks(("commit", 2)))
    assert service.rebalance().decision == "aborted"
    assert service.rebalance().decision == "applied"
    assert service.current.placement.epoch == 2


def test_a_fault_after_the_switch_is_told_but_the_new_epoch_serves(folder: Path) -> None:
    ranks = make_ranks(("await_epoch", 1))
    service = make_service(folder, ranks)
    assert service.rebalance().decision == "applied"
    assert {rank.table.epoch for rank in ranks.ranks} == {1}


def test_whoever_waits_for_an_epoch_is_told_when_the_ranks_part() -> None:
    epochs = Rank(0, first_plan().placement).epochs
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(epochs.await_epoch, 1, 60)
        epochs.close()
        with pytest.raises(MigrationError, match="serves 0: the ranks have parted"):
            waiting.result(timeout=10)


def test_ranks_never_serve_two_epochs_at_a_time(folder: Path) -> None:
    for fault in [(method, 1) for method in ("copy_round", "prepare", "commit", "await_epoch")]:
        ranks = make_ranks(fault)
        (folder / "history.sqlite").unlink(missing_ok=True)
        make_service(folder, ranks).rebalance()
        assert all(len(served) == 1 for served in ranks.served)


def test_a_plan_that_does_not_pay_is_left(folder: Path) -> None:
    service = make_service(folder, make_ranks(), min_gain=0.99)
    result = service.rebalance()
    assert result.decision == "left"
    assert "at least 99.0% is asked for" in result.reason
    assert service.current.placement.epoch == 0


def _measured(ratio: float, high: float) -> dict[str, Any]:
    visits = {"ratio": ratio, "low": ratio - 0.05, "high": high, "num_requests": 40, "holds": high < 1}
    return {"trust": {"after_over_before": visits}}


@pytest.mark.parametrize("most_copies", [0, 2])
def test_the_fast_loop_keeps_the_placement_but_for_a_few_copies(folder: Path, most_copies: int) -> None:
    ranks = make_ranks()
    service = make_service(folder, ranks)
    before = service.current.placement
    result = service.rebalance(is_gated=False, most_copies=most_copies)
    assert result.decision == "applied"
    assert service.current.placement.epoch == 1
    assert num_copies_between(before, service.current.placement) <= most_copies
    for number, rank in enumerate(ranks.ranks):
        assert rank.slab.experts() == result.plan.placement.experts_on(number)


def measured_load(before: float, after: float, visits: float) -> dict[str, Any]:
    trust = {"after_over_before": {"ratio": visits}}
    return {"before": {"load_max_over_mean": before}, "after": {"load_max_over_mean": after}, "trust": trust}


def test_levelling_must_lower_the_heaviest_load_and_not_raise_visits() -> None:
    assert gate_levelled(measured_load(1.4, 1.2, 1.0), 0.02) is None
    assert "1.390" in str(gate_levelled(measured_load(1.4, 1.39, 1.0), 0.02))
    assert "visits would rise by 10.0%" in str(gate_levelled(measured_load(1.4, 1.2, 1.1), 0.02))


def test_the_gate_says_what_it_compares() -> None:
    assert gate(_measured(0.95, 0.97), 0.04) is None
    reason = gate(_measured(0.95, 0.97), 0.06)
    assert reason is not None
    assert "save 5.0%" in reason


def test_a_gain_that_may_be_chance_is_not_enacted() -> None:
    reason = gate(_measured(0.95, 1.01), 0.04)
    assert reason is not None
    assert "40 held-out requests leave room for no gain" in reason


def test_nothing_to_save_is_not_worth_a_move() -> None:
    assert gate(_measured(1.0, 1.0), 0.01) is not None


def test_a_cluster_that_has_served_nothing_can_not_be_rebalanced(tmp_path: Path) -> None:
    with pytest.raises(MoetisError, match=r"the folder has no"):
        make_service(tmp_path, make_ranks()).rebalance()


def test_the_history_is_there_after_a_restart(folder: Path) -> None:
    make_service(folder, make_ranks()).rebalance()
    served = History(folder / "history.sqlite").served()
    assert served is not None
    assert served.placement.epoch == 1
    assert served.measured["held_out"]["requests"] == 10
