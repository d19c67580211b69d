"""The ring on a GPU, beside memory that is pinned."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.workers.test_pinning import Refusing
from workers import cuda_edge, pinning
from workers.bounce_link import BounceLink
from workers.cuda_edge import link_for
from workers.links import Pair
from workers.pinning import HostRows, host_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]
DEVICE = torch.device("cuda", 0)
ROWS, PINNED, BLOB = 8, 3, 10_000_384


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostRows]:
    """Rows of which CUDA refused to pin all but the first."""
    size = -(-BLOB // 4096) * 4096
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with monkeypatch.context() as patch:
        patch.setattr(pinning, "CHUNK_BYTES", size)
        patch.setattr(torch.cuda, "cudart", lambda: Refusing(PINNED, runtime))
        found = host_memory(ROWS, size, pin=True)
    for row in found.rows:
        row.copy_(torch.randint(256, (size,), dtype=torch.uint8))
    yield found
    torch.cuda.synchronize()


def _pairs(memory: HostRows) -> list[Pair]:
    """The bytes of an expert from each row, which ends in the middle of a page."""
    target = torch.full((ROWS, BLOB), 9, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    return [(slot, row[:BLOB]) for slot, row in zip(target, memory.rows, strict=True)]


@pytest.mark.parametrize("urgent", [True, False])
@pytest.mark.parametrize("bare", [True, False])
def test_rows_that_are_not_pinned_arrive_whole_beside_those_that_are(
    memory: HostRows, urgent: bool, bare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bare:
        monkeypatch.setattr(cuda_edge, "bare_submit", lambda device: None)
    assert memory.num_pinned == PINNED
    pairs = _pairs(memory)
    link = link_for(DEVICE, memory)
    assert isinstance(link, BounceLink)
    link.copy(pairs, after=link.fence(), urgent=urgent).wait()
    assert all(torch.equal(slot.cpu(), row) for slot, row in pairs)
    link.close()


def test_a_slot_is_read_to_the_end_before_the_ring_overwrites_it(memory: HostRows) -> None:
    pairs = _pairs(memory)
    link = link_for(DEVICE, memory)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    read = [slot.clone() for slot, _ in pairs]
    arrival = link.copy(pairs, after=link.fence(), urgent=True)
    assert not arrival.done()
    arrival.wait()
    copied = [slot.clone() for slot, _ in pairs]
    assert all(bool(seen.eq(9).all()) for seen in read)
    assert all(torch.equal(seen.cpu(), row) for seen, (_, row) in zip(copied, pairs, strict=True))
    link.close()


def test_who_asks_is_not_held_up(memory: HostRows) -> None:
    pairs = _pairs(memory) * 4
    link = link_for(DEVICE, memory)
    # A ring's first copies take longer.
    link.copy(pairs[:ROWS], after=None, urgent=True).finish()
    begun = time.perf_counter()
    arrival = link.copy(pairs, after=None, urgent=True)
    asked = time.perf_counter() - begun
    arrival.finish()
    assert asked < 0.5 * (time.perf_counter() - begun)
    link.close()
