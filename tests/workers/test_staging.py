"""Indices on their way to a device and back: whole, in whatever sizes; on a GPU past large copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.mapped import device_view
from workers.staging import Staging

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


def test_what_is_sent_arrives_in_its_shape_also_where_it_has_no_room() -> None:
    staging = Staging(DEVICE, capacity=64)
    for _ in range(2):
        staging.begin()
        arrays = [np.arange(start, start + 12).reshape(3, 4) for start in range(0, 96, 12)]
        sent = [staging.send(array) for array in arrays]
        assert all(torch.equal(there.cpu(), torch.from_numpy(array)) for there, array in zip(sent, arrays, strict=True))


def test_what_is_shown_can_be_read_on_the_device_until_the_next_beginning() -> None:
    staging = Staging(DEVICE, capacity=64)
    for _ in range(2):
        staging.begin()
        arrays = [np.arange(start, start + 12) for start in range(0, 96, 12)]
        shown = [staging.show(array) for array in arrays]
        assert all(there.device.type == DEVICE.type for there in shown)
        assert all((there + 1).tolist() == (array + 1).tolist() for there, array in zip(shown, arrays, strict=True))


@pytest.mark.parametrize("size", [3, 100])
def test_what_is_fetched_is_flat_and_of_the_stagings_type(size: int) -> None:
    staging = Staging(DEVICE, capacity=64)
    first = torch.arange(2 * size, dtype=torch.int32, device=DEVICE).reshape(2, size)
    second = torch.arange(size, dtype=torch.int64) - 1
    one, two = staging.fetch(first, second)
    assert (one.dtype, two.dtype) == (np.int64, np.int64)
    assert one.tolist() == list(range(2 * size))
    assert two.tolist() == list(range(-1, size - 1))


def test_nothing_is_fetched_from_nothing() -> None:
    (none,) = Staging(DEVICE).fetch(torch.zeros((0, 8), dtype=torch.int64, device=DEVICE))
    assert none.shape == (0,)


@needs_gpu
def test_kernels_see_pinned_memory_as_it_is_when_they_run() -> None:
    pinned = torch.zeros(16, dtype=torch.int32, pin_memory=True)
    seen = device_view(pinned, DEVICE)
    assert seen is not None
    pinned[:] = torch.arange(16)
    assert torch.equal((seen * 2).cpu(), 2 * torch.arange(16, dtype=torch.int32))


@needs_gpu
def test_a_table_overtakes_large_copies_to_the_device() -> None:
    staging = Staging(DEVICE)
    staging.send(np.zeros(66, np.int64))
    staging.begin()
    large = torch.zeros(1 << 28, dtype=torch.uint8, pin_memory=True)
    target, stream = torch.empty_like(large, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(8):
            target.copy_(large, non_blocking=True)
    there = staging.send(np.arange(66))
    torch.cuda.current_stream().synchronize()
    assert not stream.query()
    assert torch.equal(there.cpu(), torch.arange(66))
