"""Two ranks agree on a parcel (real gloo, two threads), or both know at once why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from placement.core import ExpertId, Slot
from placement.errors import MigrationError, StaleEpochError
from placement.migration import Move
from tests.workers.ranks import both, meet_in_threads
from workers.handshake import Handshake

MOVE = Move(expert=ExpertId(2, 5), source=Slot(0, 0), target=Slot(1, 0))


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[Handshake, Handshake]]:
    met = meet_in_threads(2, epoch=7)
    yield tuple(Handshake(each.signals, rank=each.rank, most=3 + each.rank) for each in met)  # type: ignore[misc]
    for each in met:
        each.leave()


def _no_room() -> None:
    raise MigrationError("no room for it")


def test_a_yes_tells_each_end_how_many_parcels_the_other_can_have_begun(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    offered, taken = both(lambda: sender.offer(9, MOVE), lambda: receiver.take(9, MOVE, lambda: "rows"))
    assert offered.result() == 4
    assert taken.result() == ("rows", 3)


def test_another_epoch_is_refused_on_both_ends_and_no_room_is_made(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    made: list[str] = []
    offered, taken = both(lambda: sender.offer(8, MOVE), lambda: receiver.take(9, MOVE, lambda: made.append("rows")))
    with pytest.raises(MigrationError, match=r"rank 1 does not take ExpertId\(layer=2, expert=5\) for epoch 8"):
        offered.result()
    with pytest.raises(StaleEpochError, match="moves to epoch 9, but rank 0 sends for epoch 8"):
        taken.result()
    assert made == []


def test_another_expert_is_refused_on_both_ends_and_no_room_is_made(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    made: list[str] = []
    other = replace(MOVE, expert=ExpertId(2, 6))
    offered, taken = both(lambda: sender.offer(9, other), lambda: receiver.take(9, MOVE, lambda: made.append("rows")))
    with pytest.raises(MigrationError, match="does not take"):
        offered.result()
    with pytest.raises(MigrationError, match=r"waits for .*expert=5\), but rank 0 sends .*expert=6\)"):
        taken.result()
    assert made == []


def test_where_there_is_no_room_the_sender_hears_no(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    offered, taken = both(lambda: sender.offer(9, MOVE), lambda: receiver.take(9, MOVE, _no_room))
    with pytest.raises(MigrationError, match="does not take"):
        offered.result()
    with pytest.raises(MigrationError, match="no room for it"):
        taken.result()


def test_who_waits_for_what_does_not_come_is_told(ends: tuple[Handshake, Handshake]) -> None:
    sender, receiver = ends
    withheld, taken = both(lambda: sender.withhold(MOVE), lambda: receiver.take(9, MOVE, lambda: "rows"))
    assert withheld.result() is None
    with pytest.raises(MigrationError, match="rank 0 has not got all that it was to send"):
        taken.result()
