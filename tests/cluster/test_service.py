"""The placement service against ranks that keep real epochs, with a fault put at every step of a migration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster import history as states
from cluster.history import History
from cluster.service import PlacementService, gate
from placement.baselines import linear_placement
from placement.core import Placement
from placement.errors import MigrationError, MoetisError
from placement.planfile import Plan
from placement.topology import load_topology
from placement.trace import RoutingTrace, write_segment
from workers.epochs import EpochKeeper
from workers.host_slab import HostSlab
from workers.routing import RoutingTable
from workers.slot_cache import SlotCache
from workers.worker import WorkerStatus

LAYERS, EXPERTS, RANKS, ROWS = 2, 8, 4, 3
TOPOLOGY = load_topology("2x2")


class Rank:
    """One rank without a model: its slab, its epochs, and a copy that takes the blob from the source's slab."""

    def __init__(self, rank: int, placement: Placement) -> None:
        self.slab = HostSlab(capacity=2 * LAYERS * ROWS, blob_bytes=256)
        for expert in placement.experts_on(rank):
            self.slab.add(expert, torch.zeros(256, dtype=torch.uint8))
        cache = SlotCache(
            slab=self.slab, num_layers=LAYERS, slots_per_layer=1, blob_bytes=256, device=torch.device("cpu")
        )
        self.table = RoutingTable(placement=placement, topology=TOPOLOGY, rank=rank, top_k=2)
        self.epochs = EpochKeeper(table=self.table, slab=self.slab, cache=cache, timeout_s=5)


class LocalRanks:
    """All ranks in this process; they vote after every call. fault: (method, rank) at which a call fails, once."""

    def __init__(self, placement: Placement, fault: tuple[str, int] | None = None) -> None:
        self.ranks = [Rank(rank, placement) for rank in range(RANKS)]
        self.fault = fault
        self.served: list[set[int]] = []

    def call(self, method: str, arguments: Iterable[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        answers = []
        for rank, values in arguments:
            if (method, rank) == self.fault:
                self.fault = None
                raise MigrationError(f"{method}: rank {rank} does not answer")
            answers.append(getattr(self, method)(self.ranks[rank], rank, *values))
        self.vote()
        return answers

    def vote(self) -> None:
        agreed = min(rank.epochs.vote() for rank in self.ranks)
        for rank in self.ranks:
            rank.epochs.enter(agreed)
        self.served.append({rank.table.epoch for rank in self.ranks})

    def flush_trace(self, rank: Rank, number: int) -> None:
        pass

    def expert_bytes(self, rank: Rank, number: int) -> int:
        return 256

    def copy_round(self, rank: Rank, number: int, epoch: int, moves: Any) -> int:
        for move in moves:
            if move.target.rank == number:
                rank.slab.add(move.expert, self.ranks[move.source.rank].slab.blob(move.expert))
        return 0

    def prepare(self, rank: Rank, number: int, target: Placement) -> None:
        rank.epochs.prepare(target)

    def commit(self, rank: Rank, number: int, epoch: int) -> None:
        rank.epochs.commit(epoch)

    def abort(self, rank: Rank, number: int, epoch: int) -> int:
        return rank.epochs.abort(epoch)

    def drop(self, rank: Rank, number: int, epoch: int) -> int:
        return rank.epochs.drop(epoch)

    def status(self, rank: Rank, number: int) -> WorkerStatus:
        return WorkerStatus(
            rank=number,
            epoch=rank.table.epoch,
            alive=True,
            error=None,
            steps=0,
            experts=0,
            host_slab_bytes=0,
            slot_bytes=0,
            cache={},
            recorder={},
            traffic={},
        )


def _trace(folder: Path) -> None:
    """Two kinds of requests that use the even and the odd experts."""
    rng = np.random.default_rng(0)
    num_tokens = 600
    request = np.repeat(np.arange(20), num_tokens // 20)
    pick = np.sort(rng.random((num_tokens, LAYERS, EXPERTS // 2)).argsort(axis=2)[:, :, :2], axis=2)
    write_segment(
        RoutingTrace(
            num_experts=EXPERTS,
            experts=(2 * pick + (request // 2 % 2)[:, None, None]).astype(np.uint8),
            request=request.astype(np.int64),
            position=np.tile(np.arange(num_tokens // 20), 20).astype(np.int32),
            step=np.zeros(num_tokens, np.int64),
            source_rank=np.full(num_tokens, -1, np.int32),
            phase=np.zeros(num_tokens, np.uint8),
        ),
        folder / "rank00000-00000000.safetensors",
    )


def make_service(folder: Path, ranks: LocalRanks, min_gain: float = 0.01) -> PlacementService:
    return PlacementService(
        history=History(folder / "history.sqlite"),
        ranks=ranks,
        initial=Plan(placement=linear_placement(LAYERS, EXPERTS, RANKS, ROWS), topology=TOPOLOGY, measured={}),
        trace_dir=folder,
        min_gain=min_gain,
        seed=0,
    )


def make_ranks(fault: tuple[str, int] | None = None) -> LocalRanks:
    return LocalRanks(linear_placement(LAYERS, EXPERTS, RANKS, ROWS), fault)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _trace(tmp_path)
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
    ranks = make_ranks(("status", 1))
    service = make_service(folder, ranks)
    assert service.rebalance().decision == "applied"
    assert {rank.table.epoch for rank in ranks.ranks} == {1}


def test_ranks_never_serve_two_epochs_at_a_time(folder: Path) -> None:
    for fault in [(method, 1) for method in ("copy_round", "prepare", "commit", "status")]:
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
