"""Experts on their way between two ranks (real gloo, two threads): what counts, what is refused, what is capped."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
import torch

from placement.core import ExpertId, Slot
from placement.errors import ExchangeError, MigrationError, StaleEpochError
from placement.migration import Move
from tests.workers.ranks import both
from workers import peers
from workers.heads import MOST_IN_A_RUN
from workers.host_slab import HostSlab
from workers.mover import Mover, Pace, num_copiers

BLOB = 4096
FIRST, SECOND = ExpertId(0, 0), ExpertId(0, 1)
MOVES = tuple(Move(expert=expert, source=Slot(0, 0), target=Slot(1, 0)) for expert in (FIRST, SECOND))


def _blob(value: int) -> torch.Tensor:
    return torch.full((BLOB,), value, dtype=torch.uint8)


def _mover(group: peers.Peers, slab: HostSlab, **more: Any) -> Mover:
    return Mover(slab, group=group.bulk, rank=group.rank, blob_bytes=BLOB, **more)


def _slabs() -> tuple[HostSlab, HostSlab]:
    source, target = HostSlab(capacity=4, blob_bytes=BLOB), HostSlab(capacity=4, blob_bytes=BLOB)
    source.add(FIRST, _blob(3))
    source.add(SECOND, _blob(5))
    return source, target


def test_experts_arrive_whole(groups: list[peers.Peers]) -> None:
    source, target = _slabs()
    sent, got = both(
        lambda: _mover(groups[0], source).copy_round(9, MOVES), lambda: _mover(groups[1], target).copy_round(9, MOVES)
    )
    assert (sent.result(), got.result()) == (0, 2 * BLOB)
    assert target.blob(FIRST).equal(_blob(3))
    assert target.blob(SECOND).equal(_blob(5))


def test_a_round_of_many_experts_each_way_arrives_whole(groups: list[peers.Peers]) -> None:
    slabs = [HostSlab(capacity=64, blob_bytes=BLOB) for _ in range(2)]
    moves = [
        Move(expert=ExpertId(rank, number), source=Slot(rank, number), target=Slot(1 - rank, number))
        for rank in range(2)
        for number in range(20)
    ]
    for move in moves:
        slabs[move.source.rank].add(move.expert, _blob(100 * move.expert.layer + move.expert.expert))
    slabs[1].add(ExpertId(0, 3), _blob(3))
    ends = both(*(partial(_mover(groups[rank], slabs[rank]).copy_round, 9, moves) for rank in range(2)))
    assert [end.result() for end in ends] == [20 * BLOB, 19 * BLOB]
    for move in moves:
        assert slabs[move.target.rank].blob(move.expert).equal(_blob(100 * move.expert.layer + move.expert.expert))


def test_what_is_sent_for_another_epoch_is_refused(groups: list[peers.Peers]) -> None:
    source, target = _slabs()
    _, got = both(
        lambda: _mover(groups[0], source).copy_round(8, MOVES[:1]),
        lambda: _mover(groups[1], target).copy_round(9, MOVES[:1]),
    )
    with pytest.raises(StaleEpochError, match="moves to epoch 9, but rank 0 sends for epoch 8"):
        got.result()
    assert target.experts() == frozenset()


def test_an_expert_that_is_here_already_is_not_taken_twice(groups: list[peers.Peers]) -> None:
    source, target = _slabs()
    target.add(FIRST, _blob(3))
    _, got = both(
        lambda: _mover(groups[0], source).copy_round(9, MOVES), lambda: _mover(groups[1], target).copy_round(9, MOVES)
    )
    assert got.result() == BLOB
    assert target.experts() == {FIRST, SECOND}


def test_a_rank_sends_no_faster_than_its_cap(groups: list[peers.Peers]) -> None:
    source, target = (HostSlab(capacity=MOST_IN_A_RUN + 4, blob_bytes=BLOB) for _ in range(2))
    moves = [Move(expert=ExpertId(0, number), source=Slot(0, 0), target=Slot(1, 0)) for number in range(12)]
    for move in moves:
        source.add(move.expert, _blob(move.expert.expert))
    start = time.monotonic()
    both(
        lambda: _mover(groups[0], source, max_bytes_per_s=16 * BLOB).copy_round(9, moves),
        lambda: _mover(groups[1], target).copy_round(9, moves),
    )
    assert time.monotonic() - start >= 0.25
    assert len(target.experts()) == 12


def test_a_pace_waits_for_each_blob() -> None:
    pace = Pace(100, 50.0)
    assert [pace.wait_s(now) for now in (10.0, 12.0, 13.0, 20.0)] == [0.0, 0.0, 1.0, 0.0]


def test_blobs_that_belong_together_may_use_the_time_before_them() -> None:
    pace = Pace(100, 50.0, together=3)
    assert [pace.wait_s(10.0) for _ in range(5)] == [0.0, 0.0, 0.0, 2.0, 4.0]
    # Copying took as long as the pace asks for: nothing more is waited for.
    assert [pace.wait_s(now) for now in (16.0, 18.0)] == [0.0, 0.0]


def test_without_a_cap_there_is_nothing_to_wait_for() -> None:
    pace = Pace(100, None)
    assert [pace.wait_s(10.0) for _ in range(20)] == [0.0] * 20


def test_a_rank_that_leaves_waits_no_longer_for_an_expert(groups: list[peers.Peers]) -> None:
    _, target = _slabs()
    start = time.monotonic()
    got, _ = both(lambda: _mover(groups[1], target).copy_round(9, MOVES), lambda: (time.sleep(0.3), groups[1].leave()))
    with pytest.raises(MigrationError, match="left the group"):
        got.result()
    assert time.monotonic() - start < 10
    assert target.num_free == 4


def test_a_rank_that_leaves_waits_no_longer_for_a_step(groups: list[peers.Peers]) -> None:
    votes = torch.zeros(1, dtype=torch.int64)
    start = time.monotonic()
    got, _ = both(lambda: groups[0].control.all_reduce_max(votes), lambda: (time.sleep(0.3), groups[0].leave()))
    with pytest.raises(ExchangeError, match="left the group"):
        got.result()
    assert time.monotonic() - start < 10
    with pytest.raises(ExchangeError, match="left the group"):
        groups[0].control.all_reduce_max(votes)


def test_an_expert_that_the_source_does_not_hold_is_named_on_both_ends(groups: list[peers.Peers]) -> None:
    empty, target = (HostSlab(capacity=1, blob_bytes=BLOB) for _ in range(2))
    start = time.monotonic()
    ends = both(
        lambda: _mover(groups[0], empty).copy_round(9, MOVES), lambda: _mover(groups[1], target).copy_round(9, MOVES)
    )
    for each in ends:
        with pytest.raises(MigrationError, match="has no copy of"):
            each.result()
    assert time.monotonic() - start < 10
    assert (target.experts(), target.num_free) == (frozenset(), 1)


def test_without_a_bound_a_cap_is_none() -> None:
    assert num_copiers(math.inf) == num_copiers(None)
