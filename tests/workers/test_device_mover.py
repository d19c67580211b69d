"""The mover of GPUs without one: gloo carries what NCCL would, and nothing runs beside anything. What counts, and what
both ends know of a failure, is the same. The real one: tests/gpu/test_moves_on_gpus.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from placement.core import ExpertId, Slot
from placement.errors import MigrationError
from placement.migration import Move
from tests.workers.ranks import CPU, both, meet_in_threads
from workers import device_mover, peers
from workers.device_mover import DeviceMover
from workers.host_slab import HostSlab
from workers.parcels import HEAD_BYTES, RING

BLOB, EACH_WAY = 4096, 20


class _Over:
    """An event that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class _Ring:
    """As `ParcelRing`, on the host. spoils: how many blobs from now on do not come as they were sent."""

    def __init__(self, blob_bytes: int, num_blobs: int, device: torch.device) -> None:
        self.buffers = torch.zeros((RING, num_blobs, HEAD_BYTES + blob_bytes), dtype=torch.uint8)
        self.heads = torch.zeros((RING, num_blobs, 2), dtype=torch.int64)
        self.up = self.wire = self.down = self
        self.spoils = 0

    def wait_event(self, event: _Over) -> None:
        return

    def head(self, buffer: int, count: int) -> torch.Tensor:
        return self.buffers[buffer, :count, :16].view(torch.int64)

    def add_up(self, buffer: int, count: int, column: int) -> None:
        if column == 1 and self.spoils:
            self.spoils -= 1
            self.buffers[buffer, 0, HEAD_BYTES] += 1
        self.head(buffer, count)[:, column] = self.buffers[buffer, :count, HEAD_BYTES:].view(torch.int64).sum(dim=1)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[peers.Peers]]:
    monkeypatch.setattr(device_mover, "ParcelRing", _Ring)
    monkeypatch.setattr(device_mover, "_mark", lambda stream: _Over())
    monkeypatch.setattr(device_mover, "blobs_in_parcel", lambda blob_bytes: 2)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    found = meet_in_threads(2, epoch=7)
    yield found
    for group in found:
        group.leave()


def _blob(expert: ExpertId) -> torch.Tensor:
    return torch.full((BLOB,), 100 * expert.layer + expert.expert, dtype=torch.uint8)


def _moves() -> list[Move]:
    return [
        Move(expert=ExpertId(rank, number), source=Slot(rank, number), target=Slot(1 - rank, number))
        for rank in range(2)
        for number in range(EACH_WAY)
    ]


def _ends(groups: list[peers.Peers], **more: Any) -> tuple[list[HostSlab], list[DeviceMover]]:
    slabs = [HostSlab(capacity=2 * EACH_WAY, blob_bytes=BLOB) for _ in groups]
    for move in _moves():
        slabs[move.source.rank].add(move.expert, _blob(move.expert))
    movers = [
        DeviceMover(
            slab, group=each.bulk, signals=each.data, rank=each.rank, blob_bytes=BLOB, device=CPU, timeout_s=20, **more
        )
        for slab, each in zip(slabs, groups, strict=True)
    ]
    return slabs, movers


@pytest.mark.parametrize("cap", [None, 1e9])
def test_many_experts_pass_both_ways_through_the_ring(groups: list[peers.Peers], cap: float | None) -> None:
    slabs, movers = _ends(groups, max_bytes_per_s=cap)
    ends = both(*(partial(mover.copy_round, 9, _moves()) for mover in movers))
    assert [end.result() for end in ends] == [EACH_WAY * BLOB] * 2
    assert all(slabs[move.target.rank].blob(move.expert).equal(_blob(move.expert)) for move in _moves())


def test_a_spoiled_blob_does_not_count_and_the_other_end_is_not_left_waiting(groups: list[peers.Peers]) -> None:
    slabs, movers = _ends(groups)
    ring: Any = movers[1]._ring
    ring.spoils = 1
    ends = both(*(partial(mover.copy_round, 9, _moves()) for mover in movers))
    assert ends[0].result() == EACH_WAY * BLOB
    with pytest.raises(MigrationError, match=r"expert=0\) arrived from rank 0 with a wrong checksum"):
        ends[1].result()
    assert slabs[1].experts() == slabs[0].experts() - {ExpertId(0, 0)}
    assert slabs[1].num_free == 1
    ends = both(*(partial(mover.copy_round, 10, _moves()) for mover in movers))
    assert [end.result() for end in ends] == [0, BLOB]
