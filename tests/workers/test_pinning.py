from __future__ import annotations

import logging
import mmap
from typing import Any

import pytest
import torch

from workers import pinning
from workers.pinning import CHUNK_BYTES, HostRows, chunk_rows, host_memory


class Refusing:
    """A CUDA runtime that pins so many chunks and no more; runtime: who does pin those."""

    def __init__(self, most: int, runtime: Any = None) -> None:
        self.pinned: list[int] = []
        self._left = most
        self._runtime = runtime

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self._left -= 1
        if self._left < 0:
            return 2
        self.pinned.append(address)
        return int(self._runtime.cudaHostRegister(address, num_bytes, flags)) if self._runtime else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return int(self._runtime.cudaHostUnregister(address)) if self._runtime else 0


def test_host_memory_is_zeroed_and_of_the_asked_shape_even_if_empty() -> None:
    memory = host_memory(3, 5000, pin=False)
    assert memory.rows.shape == (3, 5000)
    assert not memory.rows.any()
    assert (memory.num_pinned, memory.is_pinned) == (0, False)
    assert host_memory(0, 256, pin=False).rows.shape == (0, 256)
    assert host_memory(0, 256, pin=False).is_pinned


@pytest.mark.parametrize("row_bytes", [256, 4096, 9_437_184, 12_583_168, 3 << 30])
def test_no_row_crosses_from_one_registered_chunk_to_the_next(row_bytes: int) -> None:
    size = chunk_rows(row_bytes) * row_bytes
    assert size % mmap.PAGESIZE == 0
    assert size <= max(CHUNK_BYTES, row_bytes * mmap.PAGESIZE)


@pytest.mark.parametrize(("most", "num_pinned"), [(0, 0), (2, 32), (9, 40)])
def test_after_a_refusal_the_rows_before_it_count_as_pinned_and_a_warning_says_what_it_costs(
    most: int, num_pinned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing(most))
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 4096)
    with caplog.at_level(logging.WARNING):
        memory = host_memory(40, 256, pin=True)
    assert (memory.num_pinned, memory.is_pinned) == (num_pinned, num_pinned == 40)
    assert bool(caplog.records) != memory.is_pinned
    for record in caplog.records:
        assert "through a small pinned ring" in record.getMessage()
        assert "ulimit -l unlimited" in record.getMessage()


def test_memory_is_pinned_until_nobody_looks_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Refusing(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 4096)
    memory = host_memory(40, 256, pin=True)
    row, addresses = memory.rows[3], list(runtime.pinned)
    del memory
    assert len(addresses) == 2 and runtime.pinned == addresses
    del row
    assert runtime.pinned == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False")
def test_memory_that_was_let_go_of_can_be_pinned_anew() -> None:
    for _ in range(3):
        assert host_memory(3, 5 << 20, pin=True).is_pinned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False")
def test_what_cuda_refuses_to_pin_disturbs_no_later_call() -> None:
    memory = host_memory(3, 5 << 20, pin=True)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert int(runtime.cudaHostRegister(memory.rows.data_ptr(), 4096, 0)) != 0
    pinning.clear_error()
    assert torch.ones(2, device="cuda").sum() == 2


def test_a_row_is_pinned_if_it_begins_where_pinned_memory_is() -> None:
    rows = torch.zeros((4, 100), dtype=torch.uint8)
    memory = HostRows(rows, 3)
    assert [row.data_ptr() in memory.pinned for row in rows] == [True, True, True, False]
    assert rows.data_ptr() not in HostRows(rows, 0).pinned
