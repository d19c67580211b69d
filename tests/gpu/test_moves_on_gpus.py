"""Experts on their way between two GPUs, over NCCL: beside collectives of another group, and where one end says no."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from placement.core import ExpertId, Slot
from placement.errors import MoetisError
from placement.migration import Move
from tests.workers.ranks import meet, run_ranks
from workers.device_mover import STALL_S
from workers.handshake import Handshake
from workers.host_slab import HostSlab
from workers.movers import make_movers
from workers.parcels import blobs_in_parcel, parcels
from workers.peers import Peers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

BLOB = 4 << 20
COUNT = 48


def _moves(count: int, source: int = 0) -> list[Move]:
    return [
        Move(expert=ExpertId(0, number), source=Slot(source, 0), target=Slot(1 - source, 0)) for number in range(count)
    ]


def _blob(number: int) -> torch.Tensor:
    return torch.arange(BLOB // 4, dtype=torch.int32).add_(number).view(torch.uint8)


def _mover(peers: Peers, slab: HostSlab, device: torch.device, cap: float | None = None) -> Any:
    return make_movers(slab, peers=peers, blob_bytes=BLOB, device=device, timeout_s=60, max_bytes_per_s=cap)


def _slab(rank: int, rows: int = COUNT) -> HostSlab:
    slab = HostSlab(capacity=COUNT if rank == 0 else rows, blob_bytes=BLOB, pin=True)
    if rank == 0:
        for number in range(COUNT):
            slab.add(ExpertId(0, number), _blob(number))
    return slab


def _failure(mover: Any, epoch: int, moves: list[Move]) -> str:
    try:
        mover.copy_round(epoch, moves)
    except MoetisError as error:
        return str(error)
    return ""


def move_beside_collectives(rank: int, mail: Any) -> dict[str, Any]:
    """Rounds there and back while both ranks gather all the time, with and without a cap."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    peers = meet(rank, mail, device, apart=True)
    slab = _slab(rank)
    movers = [_mover(peers, slab, device, cap) for cap in (None, 2e9)]
    rounds = 0
    over = threading.Event()

    def move() -> None:
        nonlocal rounds
        for turn in range(12):
            moves = _moves(COUNT, source=turn % 2)
            movers[turn // 2 % 2].copy_round(turn, moves)
            for each in moves:
                if each.source.rank == rank:
                    slab.release(each.expert)
            rounds += 1
        over.set()

    thread = threading.Thread(target=move)
    thread.start()
    steps, deadline = 0, time.monotonic() + 90
    unfinished = torch.ones(1, dtype=torch.int64)
    while int(unfinished):
        gathered = torch.full((512, 1024), float(rank), device=device)
        peers.data.all_gather(gathered)
        # Waits for the GPU, and takes memory anew, as a step does now and then.
        assert float(gathered[256 * (1 - rank), 0].item()) == 1 - rank
        torch.cuda.empty_cache()
        steps += 1
        unfinished.fill_(int(not over.is_set() and time.monotonic() < deadline))
        peers.control.all_reduce_max(unfinished)
    thread.join(timeout=60)
    alike = rank == 1 or all(slab.blob(ExpertId(0, number)).equal(_blob(number)) for number in range(COUNT))
    peers.leave()
    return {"rounds": rounds, "steps": steps, "alike": alike, "held": len(slab.experts())}


def say_no(rank: int, mail: Any) -> dict[str, Any]:
    """An epoch that differs, no room, nothing to send; a round that is in order comes after each."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    peers = meet(rank, mail, device, apart=True)
    slab = _slab(rank, rows=16)
    mover = _mover(peers, slab, device)
    found: dict[str, Any] = {}
    begun = time.monotonic()
    found["epoch"] = _failure(mover, 5 + rank, _moves(2))
    found["after epoch"] = _failure(mover, 7, _moves(2))
    found["room"] = _failure(mover, 8, _moves(40))
    found["after room"] = _failure(mover, 9, _moves(4))
    if rank == 0:
        slab.release(ExpertId(0, 5))
    found["nothing"] = _failure(mover, 10, _moves(8))
    found["after nothing"] = _failure(mover, 11, _moves(5))
    found["seconds"] = time.monotonic() - begun
    found["alike"] = all(slab.blob(ExpertId(0, number)).equal(_blob(number)) for number in range(5))
    peers.leave()
    return found


def stand_still(rank: int, mail: Any) -> dict[str, Any]:
    """Rank 1 says yes to parcels and takes none; both gather all the time."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    peers = meet(rank, mail, device, apart=True)
    slab = _slab(rank)
    mover = _mover(peers, slab, device)
    failure: list[str] = []

    def move() -> None:
        if rank == 0:
            failure.append(_failure(mover, 3, _moves(COUNT)))
            return
        # NCCL itself has room for the first parcels, so that those seem to be taken.
        handshake = Handshake(peers.signals, rank=1, most=1)
        with suppress(MoetisError):
            for parcel in parcels(_moves(COUNT), 1, blobs_in_parcel(BLOB)):
                handshake.take(3, parcel[0], lambda: None)

    thread = threading.Thread(target=move)
    thread.start()
    slowest, deadline = 0.0, time.monotonic() + 2 * STALL_S
    unfinished = torch.ones(1, dtype=torch.int64)
    while int(unfinished):
        begun = time.monotonic()
        gathered = torch.full((512, 1024), float(rank), device=device)
        peers.data.all_gather(gathered)
        assert float(gathered[256 * (1 - rank), 0].item()) == 1 - rank
        slowest = max(slowest, time.monotonic() - begun)
        unfinished.fill_(int(time.monotonic() < deadline))
        peers.control.all_reduce_max(unfinished)
    peers.leave()
    thread.join(timeout=60)
    return {"failure": failure, "slowest": slowest}


def test_a_transfer_that_stands_still_is_broken_off_and_the_others_go_on() -> None:
    first, second = run_ranks(stand_still, 2)
    assert "was broken off" in first["failure"][0]
    assert max(first["slowest"], second["slowest"]) < STALL_S + 5


def test_rounds_pass_beside_collectives_of_the_same_gpus() -> None:
    for rank, seen in enumerate(run_ranks(move_beside_collectives, 2)):
        assert seen["rounds"] == 12
        assert seen["steps"] > 0
        assert seen["alike"]
        assert seen["held"] == (COUNT if rank == 0 else 0)


def test_where_one_end_says_no_both_know_at_once_and_the_next_round_passes() -> None:
    first, second = run_ranks(say_no, 2)
    assert "does not take" in first["epoch"]
    assert "moves to epoch 6, but rank 0 sends for epoch 5" in second["epoch"]
    assert "does not take" in first["room"]
    assert "no room" in second["room"]
    assert "has no copy of" in first["nothing"]
    assert "has not got all" in second["nothing"]
    for seen in (first, second):
        assert [seen[name] for name in ("after epoch", "after room", "after nothing")] == ["", "", ""]
        assert seen["seconds"] < 20
        assert seen["alike"]
