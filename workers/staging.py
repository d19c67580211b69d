"""Small arrays of indices on their way to and from a GPU, through pinned memory.

To the GPU the host goes on while the stream still waits; from it the host waits for the stream, as short as it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.cuda_runtime import bare_submit
from workers.mapped import device_view

CAPACITY = 8192


class Staging:
    """Integers of one type. Buffers of `capacity`, two pinned and one on the device, that are written from their
    beginning again after `begin`. Views into them are kept, since a view takes as long to make as a small copy.
    """

    def __init__(self, device: torch.device, *, dtype: torch.dtype = torch.int64, capacity: int = CAPACITY) -> None:
        self._device = device
        self._used = 0
        self._capacity = capacity if device.type == "cuda" else 0
        pin = self._capacity > 0
        self._pinned = torch.zeros(self._capacity, dtype=dtype, pin_memory=pin)
        self._seen = device_view(self._pinned, device) if pin else None
        self._there = torch.zeros(self._capacity, dtype=dtype, device=device)
        self._fetched = torch.zeros(self._capacity, dtype=dtype, pin_memory=pin)
        self._submit = bare_submit(device) if pin else None
        self._views: dict[tuple[int, tuple[int, ...]], _Views] = {}
        self._places: dict[tuple[int, int], tuple[torch.Tensor, NDArray[Any]]] = {}

    def begin(self) -> None:
        """The stream has done all that was sent so far."""
        self._used = 0

    def fetch(self, *ids: torch.Tensor, meanwhile: Callable[[], None] = lambda: None) -> list[NDArray[Any]]:
        """Integers of the device or of the host, each flat, on the host, until the next call. What was launched before
        it is done then, unless there are none: whoever asks for none knows that it is. meanwhile: what the host does
        before it waits."""
        self.begin()
        if sum(each.numel() for each in ids if each.is_cuda) > self._capacity:
            meanwhile()
            return [each.reshape(-1).cpu().to(self._fetched.dtype).numpy() for each in ids]
        start, found = 0, list[NDArray[Any]]()
        stream = torch.cuda.current_stream(self._device) if self._capacity else None
        for each in ids:
            if not each.is_cuda:
                found.append(each.reshape(-1).to(self._fetched.dtype).numpy())
                continue
            here, seen = self._place(start, each.numel())
            if self._submit is None or stream is None or each.dtype != here.dtype or not each.is_contiguous():
                here.copy_(each.reshape(-1), non_blocking=True)
            else:
                self._submit(here, each, stream.cuda_stream, each.nbytes)
            found.append(seen)
            start += each.numel()
        meanwhile()
        if ids and stream is not None:
            stream.synchronize()
        return found

    def _place(self, start: int, size: int) -> tuple[torch.Tensor, NDArray[Any]]:
        place = self._places.get((start, size))
        if place is None:
            here = self._fetched[start : start + size]
            place = here, here.numpy()
            if len(self._places) < CAPACITY // 16:
                self._places[start, size] = place
        return place

    def send(self, array: NDArray[Any]) -> torch.Tensor:
        """The array on the device, for what is computed until `begin`. What has no room goes from pageable memory."""
        views = self._reserve(array)
        if views is None:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
        if views.seen is None:
            views.written[...] = array
            return views.there.copy_(views.here, non_blocking=True)
        # Of all kernels that could carry them over this takes the least of the host's time: it inverts them once more.
        np.invert(array, out=views.written)
        return torch.bitwise_not(views.seen, out=views.there)

    def show(self, array: NDArray[Any]) -> torch.Tensor:
        """The array where a kernel can read it, likewise, in host memory if that is possible: for a kernel that reads
        it once that takes less than to send it."""
        views = self._reserve(array)
        if views is None or views.seen is None:
            return self.send(array)
        views.written[...] = array
        return views.seen

    def _reserve(self, array: NDArray[Any]) -> _Views | None:
        """A place for an array, if there is room for it."""
        start, end = self._used, self._used + array.size
        if end > self._capacity:
            return None
        # The next one begins where 16 elements end: few sizes come again and again, and so do their views.
        self._used = -(-end // 16) * 16
        views = self._views.get((start, array.shape))
        if views is None:
            views = _Views(self, start, array.shape)
            if len(self._views) < CAPACITY // 16:
                self._views[start, array.shape] = views
        return views


class _Views:
    """A place in the buffers: as it is written, as it lies in host memory, as a kernel sees it there, on the device."""

    def __init__(self, staging: Staging, start: int, shape: tuple[int, ...]) -> None:
        stop = start + int(np.prod(shape))
        self.here = staging._pinned[start:stop].view(shape)
        self.written = self.here.numpy()
        self.seen = None if staging._seen is None else staging._seen[start:stop].view(shape)
        self.there = staging._there[start:stop].view(shape)
