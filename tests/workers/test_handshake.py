"""Two ranks agree on a parcel (real gloo, two threads), or both know at once why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from placement.core import ExpertId, Slot
from placement.errors import MigrationError, StaleEpochError
from placement.migration import Move
from workers import peers
from workers.handshake import Handshake

MOVE = Move(expert=ExpertId(2, 5), source=Slot(0, 0), target=Slot(1, 0))


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[Handshake, Handshake]]:
    store = peers.open_store(host=peers.LOOPBACK, num_ranks=2, timeout_s=20)
    meeting = peers.Rendezvous(host=peers.LOOPBACK, port=store.port, interface="lo", epoch=7)

    def join(rank: int) -> peers.Peers:
        own = store if rank == 0 else None
        return peers.join(meeting, rank=rank, num_ranks=2, device=torch.device("cpu"), timeout_s=20, store=own)

    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(join, range(2)))
    yield tuple(Handshake(each.signals, rank=each.rank, most=3 + each.rank) for each in met)  # type: ignore[misc]
    for each in met:
        each.leave()


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Future[Any], Future[Any]]:
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(first), pool.submit(second)


def _no_room() -> None:
    raise MigrationError("no room for it")


def test_a_yes_tells_each_end_how_many_parcels_the_other_can_have_begun(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    offered, taken = _both(lambda: sender.offer(9, MOVE), lambda: receiver.take(9, MOVE, lambda: "rows"))
    assert offered.result() == 4
    assert taken.result() == ("rows", 3)


def test_another_epoch_is_refused_on_both_ends_and_no_room_is_made(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    made: list[str] = []
    offered, taken = _both(lambda: sender.offer(8, MOVE), lambda: receiver.take(9, MOVE, lambda: made.append("rows")))
    with pytest.raises(MigrationError, match=r"rank 1 does not take ExpertId\(layer=2, expert=5\) for epoch 8"):
        offered.result()
    with pytest.raises(StaleEpochError, match="moves to epoch 9, but rank 0 sends for epoch 8"):
        taken.result()
    assert made == []


def test_where_there_is_no_room_the_sender_hears_no(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    offered, taken = _both(lambda: sender.offer(9, MOVE), lambda: receiver.take(9, MOVE, _no_room))
    with pytest.raises(MigrationError, match="does not take"):
        offered.result()
    with pytest.raises(MigrationError, match="no room for it"):
        taken.result()


def test_who_waits_for_what_does_not_come_is_told(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    withheld, taken = _both(lambda: sender.withhold(MOVE), lambda: receiver.take(9, MOVE, lambda: "rows"))
    assert withheld.result() is None
    with pytest.raises(MigrationError, match="rank 0 has not got all that it was to send"):
        taken.result()
