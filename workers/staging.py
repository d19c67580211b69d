"""Small arrays of indices on their way to and from a GPU, through pinned memory.

To the GPU the host goes on while the stream still waits; from it the host waits for the stream, as short as it can.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

CAPACITY = 8192


class Staging:
    """int64 only. Buffers of 64 KiB, two pinned and one on the device, that are written from their beginning again with
    each `fetch`. Views into them are kept, since a view takes as long to make as a small copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used = 0
        self._views: dict[tuple[int, tuple[int, ...]], tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]] = {}
        capacity = CAPACITY if device.type == "cuda" else 0
        self._pinned = torch.zeros(capacity, dtype=torch.int64, pin_memory=capacity > 0)
        self._there = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._fetched = torch.zeros(capacity, dtype=torch.int64, pin_memory=capacity > 0)
        self._places: dict[tuple[int, int], tuple[torch.Tensor, NDArray[np.int64]]] = {}

    def fetch(self, *ids: torch.Tensor) -> list[NDArray[np.int64]]:
        """Integers of the device, each flat, on the host, until the next call. The stream has done all that was sent
        so far then."""
        self._used = 0
        if self._device.type != "cuda" or sum(each.numel() for each in ids) > CAPACITY:
            return [each.reshape(-1).cpu().numpy().astype(np.int64, copy=False) for each in ids]
        start, found = 0, []
        for each in ids:
            here, seen = self._place(start, each.numel())
            here.copy_(each.reshape(-1), non_blocking=True)
            found.append(seen)
            start += each.numel()
        torch.cuda.current_stream(self._device).synchronize()
        return found

    def _place(self, start: int, size: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        place = self._places.get((start, size))
        if place is None:
            here = self._fetched[start : start + size]
            place = here, here.numpy()
            if len(self._places) < CAPACITY // 16:
                self._places[start, size] = place
        return place

    def send(self, array: NDArray[np.int64]) -> torch.Tensor:
        """The array on the device, for what is computed until the next `fetch`. What has no room goes from pageable
        memory."""
        start, end = self._used, self._used + array.size
        if end > len(self._pinned):
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
        # The next one begins where 16 elements end: few sizes come again and again, and so do their views.
        self._used = -(-end // 16) * 16
        views = self._views.get((start, array.shape))
        if views is None:
            here = self._pinned[start:end].view(array.shape)
            views = here.numpy(), here, self._there[start:end].view(array.shape)
            if len(self._views) < CAPACITY // 16:
                self._views[start, array.shape] = views
        written, here, there = views
        written[...] = array
        return there.copy_(here, non_blocking=True)
