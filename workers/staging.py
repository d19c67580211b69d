"""Small arrays of indices on their way to a GPU, from pinned memory: the host goes on while the stream still waits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

CAPACITY = 8192


class Staging:
    """int64 only. Two buffers of 64 KiB, pinned and on the device, that are written from their beginning again after
    `begin`. Views into them are kept, since a view takes as long to make as a small copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used = 0
        self._views: dict[tuple[int, tuple[int, ...]], tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]] = {}
        capacity = CAPACITY if device.type == "cuda" else 0
        self._pinned = torch.zeros(capacity, dtype=torch.int64, pin_memory=capacity > 0)
        self._there = torch.zeros(capacity, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """The stream has done all that was sent so far."""
        self._used = 0

    def send(self, array: NDArray[np.int64]) -> torch.Tensor:
        """The array on the device, for what is computed until `begin`. What has no room goes from pageable memory."""
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
