"""Experts that change their owner without a copy: between real processes, checked, given back, and after a kill."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from placement.core import ExpertId, Slot
from placement.errors import MigrationError
from placement.migration import Move
from tests.workers.ranks import meet, run_ranks
from workers.host_slab import HostSlab, checksum
from workers.mover import Mover
from workers.offers import NOTHING, Offer
from workers.shared_slab import LENT_ONE_IN, SharedSlab, shared_slab

BLOB, ROWS = 4096, 16
FIRST, SECOND = ExpertId(0, 1), ExpertId(0, 2)


def _slab(*numbers: int) -> SharedSlab:
    slab = SharedSlab(capacity=ROWS, blob_bytes=BLOB)
    for number in numbers:
        slab.add(ExpertId(0, number), _blob(number))
    return slab


def _blob(number: int) -> torch.Tensor:
    return torch.full((BLOB,), number, dtype=torch.uint8)


def hand_over(rank: int, mail: Any) -> Any:
    """Rank 0 lends an expert to rank 1, drops it, and is killed; rank 1 serves it on."""
    groups = meet(rank, mail)
    slab = _slab(1, 2) if rank == 0 else _slab()
    mover = Mover(slab, group=groups.bulk, rank=rank, blob_bytes=BLOB)
    received = mover.copy_round(1, [Move(expert=FIRST, source=Slot(0, 0), target=Slot(1, 0))])
    if rank == 0:
        slab.release(FIRST)
        lent = (slab.num_free, slab.capacity, slab.figures()["rows_lent"])
        slab.add(ExpertId(0, 9), _blob(9))
        mail[1].put((os.getpid(), lent))
        time.sleep(60)
    process, lent = mail[1].get(timeout=60)
    found = {"received": received, "lent": lent, "figures": slab.figures(), "segments": _segments()}
    os.kill(process, signal.SIGKILL)
    while os.path.exists(f"/proc/{process}/fd"):  # noqa: PTH110
        if open(f"/proc/{process}/stat").read().split()[2] == "Z":  # noqa: PTH123, SIM115
            break
        time.sleep(0.01)
    found["blob"] = int(slab.blob(FIRST).unique())
    groups.leave()
    return found


def _segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "moetis" in name]  # noqa: PTH208


def test_an_expert_changes_its_owner_without_a_copy_and_outlives_the_lender() -> None:
    _, found = run_ranks(hand_over, 2, lost=frozenset({0}))
    assert found["received"] == 0
    # Two experts were there and one was dropped, whose row is lent.
    assert found["lent"] == (ROWS - 2, ROWS - 1, 1)
    assert found["figures"] == {"experts_adopted": 1, "rows_lent": 0}
    assert found["segments"] == []
    assert found["blob"] == 1


def test_a_row_is_used_again_only_once_it_was_given_back() -> None:
    lender, borrower = _slab(1), _slab()
    assert borrower.adopt(FIRST, lender.offer(FIRST), checksum(_blob(1)))
    lender.release(FIRST)
    assert (lender.num_free, borrower.experts()) == (ROWS - 1, {FIRST})
    for number in range(10, 10 + ROWS - 1):
        lender.add(ExpertId(0, number), _blob(number))
    assert borrower.blob(FIRST).equal(_blob(1))
    borrower.release(FIRST)
    lender.add(SECOND, _blob(2))
    assert lender.blob(SECOND).equal(_blob(2))


def test_an_expert_with_a_wrong_checksum_is_not_adopted() -> None:
    lender, borrower = _slab(1), _slab()
    offer = lender.offer(FIRST)
    lender.blob(FIRST)[7] += 1
    assert not borrower.adopt(FIRST, offer, checksum(_blob(1)))
    assert (borrower.experts(), lender.figures()["rows_lent"]) == (frozenset(), 0)


def test_an_offer_from_elsewhere_or_of_nothing_is_not_taken() -> None:
    lender, borrower = _slab(1), _slab()
    offer = lender.offer(FIRST)
    for other in (
        NOTHING,
        replace(offer, machine=bytes(16)),
        replace(offer, process=2**22 + 1),
        replace(offer, rows=ROWS + 100),
    ):
        assert not borrower.adopt(FIRST, other, checksum(_blob(1)))
    assert Offer.unpack(offer.pack()) == offer


def test_only_a_part_of_the_rows_is_lent_and_none_twice() -> None:
    slab = _slab(*range(1, 9))
    offers = [slab.offer(ExpertId(0, number)) for number in (1, 1, 2, 3, 4)]
    assert [offer.lends for offer in offers] == [True, False, True, False, False]
    assert sum(offer.lends for offer in offers) == ROWS // LENT_ONE_IN
    slab.withdraw(offers[0])
    assert slab.offer(ExpertId(0, 3)).lends


def test_what_is_not_lent_is_copied_from_where_it_lies() -> None:
    lender, other = _slab(1), _slab()
    offer = replace(lender.offer(FIRST), lends=False)
    assert not other.adopt(FIRST, offer, checksum(_blob(1)))
    assert not other.copy(FIRST, offer, checksum(_blob(2)))
    assert (other.experts(), other.num_free) == (frozenset(), ROWS)
    assert other.copy(FIRST, offer, checksum(_blob(1)))
    lender.blob(FIRST).zero_()
    assert other.blob(FIRST).equal(_blob(1))


def test_a_full_slab_refuses_a_copy() -> None:
    lender, full = _slab(1), _slab(*range(2, 2 + ROWS))
    with pytest.raises(MigrationError, match="no room"):
        full.copy(FIRST, replace(lender.offer(FIRST), lends=False), checksum(_blob(1)))


@pytest.mark.parametrize("kind", [HostSlab, SharedSlab])
def test_an_expert_that_is_dropped_while_it_is_held_stays_in_its_place_until_then(kind: type[HostSlab]) -> None:
    slab = kind(capacity=1, blob_bytes=BLOB)
    slab.add(FIRST, _blob(1))
    with slab.holding(FIRST) as blob, slab.holding(FIRST):
        slab.release(FIRST)
        assert not slab.holds(FIRST)
        with pytest.raises(MigrationError, match="no room"):
            slab.add(SECOND, _blob(2))
        assert blob.equal(_blob(1))
    slab.add(SECOND, _blob(2))
    assert slab.experts() == {SECOND}


def test_a_borrowed_expert_is_given_back_once_it_is_held_no_more() -> None:
    lender, borrower = _slab(1), _slab()
    assert borrower.adopt(FIRST, lender.offer(FIRST), checksum(_blob(1)))
    lender.release(FIRST)
    with borrower.holding(FIRST):
        borrower.release(FIRST)
        assert lender.num_free == ROWS - 1
    assert lender.num_free == ROWS


def test_threads_that_adopt_at_the_same_time_leave_a_slab_no_fuller_than_full(monkeypatch: Any) -> None:
    def slow(blob: torch.Tensor) -> bytes:
        time.sleep(0.2)
        return checksum(blob)

    monkeypatch.setattr("workers.shared_slab.checksum", slow)
    lender, nearly_full = SharedSlab(capacity=64, blob_bytes=BLOB), _slab(*range(20, 20 + ROWS - 1))
    for number in range(4):
        lender.add(ExpertId(0, number), _blob(number))

    def adopt(number: int) -> bool:
        expert = ExpertId(0, number)
        return nearly_full.adopt(expert, lender.offer(expert), checksum(_blob(number)))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(adopt, range(4))) == 1
    assert len(nearly_full.experts()) == ROWS


def copy_round(rank: int, mail: Any) -> Any:
    """More experts than may be lent pass from rank 0 to rank 1, which then has no room for one more."""
    groups = meet(rank, mail)
    slab = _slab(*range(1, 9)) if rank == 0 else _slab(*range(20, 20 + ROWS - 5))
    mover = Mover(slab, group=groups.bulk, rank=rank, blob_bytes=BLOB)
    moves = [Move(expert=ExpertId(0, number), source=Slot(0, 0), target=Slot(1, 0)) for number in range(1, 9)]
    received = mover.copy_round(1, moves[:7])
    same = all(slab.blob(ExpertId(0, number)).equal(_blob(number)) for number in range(1, 8))
    try:
        refused = ""
        mover.copy_round(2, moves)
    except MigrationError as error:
        refused = str(error)
    groups.leave()
    return {"received": received, "same": same, "refused": refused, "figures": slab.figures()}


def test_in_a_round_a_part_is_lent_and_the_rest_copied_and_no_room_is_told_to_both() -> None:
    sender, receiver = run_ranks(copy_round, 2)
    lent = ROWS // LENT_ONE_IN
    assert receiver["received"] == (7 - lent) * BLOB
    assert receiver["same"]
    assert receiver["figures"]["experts_adopted"] == lent
    assert "rank 1 does not take" in sender["refused"]
    assert "no room" in receiver["refused"]


def test_an_expert_whose_offer_was_lost_on_the_way_is_offered_again_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = _slab(1)
    assert slab.offer(FIRST).lends
    assert not slab.offer(FIRST).lends
    monkeypatch.setattr("workers.shared_slab.OFFER_STANDS_S", 0.0)
    assert slab.offer(FIRST).lends


def test_without_memory_to_share_experts_lie_in_private_memory(monkeypatch: Any, caplog: Any) -> None:
    def refuse(name: str) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    slab = shared_slab(capacity=4, blob_bytes=BLOB, pin=False)
    assert type(slab) is HostSlab
    assert "experts lie in private memory" in caplog.text
