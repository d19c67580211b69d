"""Rounds of copies that fail between two ranks (real gloo, two threads): both ends know, and the next one runs."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from placement.core import ExpertId, Slot
from placement.errors import MigrationError, MoetisError, StaleEpochError
from placement.migration import Move
from tests.workers.ranks import CPU, both
from workers import peers
from workers.group import Group
from workers.heads import MOST_IN_A_RUN
from workers.host_slab import HostSlab
from workers.mover import Mover
from workers.movers import make_movers

BLOB = 4096


def _blob(value: int) -> torch.Tensor:
    return torch.full((BLOB,), value, dtype=torch.uint8)


def _mover(group: peers.Peers, slab: HostSlab) -> Mover:
    return Mover(slab, group=group.bulk, rank=group.rank, blob_bytes=BLOB)


def _numbered(*numbers: int) -> list[Move]:
    return [Move(expert=ExpertId(0, number), source=Slot(0, 0), target=Slot(1, 0)) for number in numbers]


def _full_source(moves: Sequence[Move]) -> HostSlab:
    slab = HostSlab(capacity=len(moves), blob_bytes=BLOB)
    for move in moves:
        slab.add(move.expert, _blob(move.expert.expert))
    return slab


def _good_round(groups: list[peers.Peers], moves: Sequence[Move], source: HostSlab, target: HostSlab) -> None:
    ends = both(
        lambda: _mover(groups[0], source).copy_round(10, moves), lambda: _mover(groups[1], target).copy_round(10, moves)
    )
    assert [end.result() for end in ends] == [0, len(moves) * BLOB]
    assert all(target.blob(move.expert).equal(_blob(move.expert.expert)) for move in moves)


def test_without_room_for_all_of_a_run_none_is_sent_and_the_next_round_runs(groups: list[peers.Peers]) -> None:
    moves = _numbered(*range(MOST_IN_A_RUN))
    source, target = _full_source(moves), HostSlab(capacity=5, blob_bytes=BLOB)
    start = time.monotonic()
    sent, got = both(
        lambda: _mover(groups[0], source).copy_round(9, moves), lambda: _mover(groups[1], target).copy_round(9, moves)
    )
    with pytest.raises(MigrationError, match="rank 1 does not take"):
        sent.result()
    with pytest.raises(MigrationError, match="no room"):
        got.result()
    assert time.monotonic() - start < 10
    assert (target.experts(), target.num_free) == (frozenset(), 5)
    _good_round(groups, moves[:5], source, target)


@pytest.mark.parametrize(
    ("epoch", "sends", "awaits", "error"),
    [
        (8, (0, 1, 2), (0, 1), "sends for epoch 8"),
        (8, (0, 1), (0, 1, 2), "sends for epoch 8"),
        (9, (2, 3), (0, 1), r"waits for ExpertId\(layer=0, expert=0\), but rank 0 sends ExpertId\(layer=0, expert=2\)"),
    ],
)
def test_two_ends_in_different_rounds_are_told_so_and_the_next_round_runs(
    groups: list[peers.Peers], epoch: int, sends: tuple[int, ...], awaits: tuple[int, ...], error: str
) -> None:
    moves = _numbered(*range(4))
    source, target = _full_source(moves), HostSlab(capacity=4, blob_bytes=BLOB)
    sent, got = both(
        lambda: _mover(groups[0], source).copy_round(epoch, _numbered(*sends)),
        lambda: _mover(groups[1], target).copy_round(9, _numbered(*awaits)),
    )
    with pytest.raises(MigrationError, match="rank 1 does not take"):
        sent.result()
    with pytest.raises(MoetisError, match=error):
        got.result()
    assert (target.experts(), target.num_free) == (frozenset(), 4)
    _good_round(groups, moves, source, target)


class _Noisy:
    """A group that spoils the second blob that comes."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._blobs = 0
        self.send = group.send

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.receive(tensor, rank)
        if tensor.numel() == BLOB:
            self._blobs += 1
            tensor[BLOB // 2] += self._blobs == 2


def test_a_blob_that_is_spoiled_on_the_way_does_not_count_and_holds_up_nothing(groups: list[peers.Peers]) -> None:
    moves = _numbered(*range(2 * MOST_IN_A_RUN))
    source, target = _full_source(moves), HostSlab(capacity=len(moves), blob_bytes=BLOB)
    noisy: Any = _Noisy(groups[1].bulk)
    sent, got = both(
        lambda: _mover(groups[0], source).copy_round(9, moves),
        lambda: Mover(target, group=noisy, rank=1, blob_bytes=BLOB).copy_round(9, moves),
    )
    assert sent.result() == 0
    with pytest.raises(MigrationError, match=r"expert=1\) arrived from rank 0 with a wrong checksum"):
        got.result()
    assert target.experts() == source.experts() - {moves[1].expert}
    assert target.num_free == 1
    _good_round(groups, moves[1:2], source, target)


def test_a_round_waits_for_one_that_was_given_up_which_still_answers(groups: list[peers.Peers]) -> None:
    moves = _numbered(0, 1)
    slabs = _full_source(moves), HostSlab(capacity=2, blob_bytes=BLOB)
    ends = [
        make_movers(slab, peers=group, blob_bytes=BLOB, device=CPU, timeout_s=20)
        for group, slab in zip(groups, slabs, strict=True)
    ]
    with ThreadPoolExecutor(3) as pool:
        given_up = pool.submit(ends[1].copy_round, 8, moves)
        time.sleep(0.3)
        behind = pool.submit(ends[1].copy_round, 9, moves)
        time.sleep(0.3)
        start = time.monotonic()
        with pytest.raises(MigrationError, match="does not take"):
            ends[0].copy_round(9, moves)
        with pytest.raises(StaleEpochError):
            given_up.result()
        assert time.monotonic() - start < 5
        assert ends[0].copy_round(9, moves) == 0
        assert behind.result() == 2 * BLOB


def test_a_group_that_waits_for_nothing_keeps_nothing_of_what_passed(groups: list[peers.Peers]) -> None:
    passed = [_blob(3), _blob(0)]
    both(lambda: groups[0].bulk.send(passed[0], 1), lambda: groups[1].bulk.receive(passed[1], 0))
    refs = [weakref.ref(tensor) for tensor in passed]
    passed.clear()
    deadline = time.monotonic() + 5
    while any(ref() is not None for ref in refs) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert [ref() for ref in refs] == [None, None]
