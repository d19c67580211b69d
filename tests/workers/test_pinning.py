from __future__ import annotations

import mmap

import pytest

from workers.pinning import CHUNK_BYTES, chunk_rows, host_memory


def test_host_memory_is_zeroed_and_of_the_asked_shape_even_if_empty() -> None:
    memory = host_memory(3, 5000, pin=False)
    assert memory.shape == (3, 5000)
    assert not memory.any()
    assert host_memory(0, 256, pin=False).shape == (0, 256)


@pytest.mark.parametrize("row_bytes", [256, 4096, 9_437_184, 12_583_168, 3 << 30])
def test_no_row_crosses_from_one_registered_chunk_to_the_next(row_bytes: int) -> None:
    size = chunk_rows(row_bytes) * row_bytes
    assert size % mmap.PAGESIZE == 0
    assert size <= max(CHUNK_BYTES, row_bytes * mmap.PAGESIZE)
