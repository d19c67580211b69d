"""Small arrays of indices on their way to a GPU, from pinned memory: the host goes on while the stream still waits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

CAPACITY = 8192


class Staging:
    """int64 only. A buffer of 64 KiB that is written from its beginning again after `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used = 0
        self._pinned = torch.zeros(0, dtype=torch.int64)
        if device.type == "cuda":
            self._pinned = torch.zeros(CAPACITY, dtype=torch.int64, pin_memory=True)

    def begin(self) -> None:
        """The stream has done all that was sent so far."""
        self._used = 0

    def send(self, array: NDArray[np.int64]) -> torch.Tensor:
        """The array on the device, for what is computed from now on. What has no room goes from pageable memory."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        end = self._used + source.numel()
        if end > len(self._pinned):
            return source.to(self._device, non_blocking=True)
        pinned = self._pinned[self._used : end].view(source.shape)
        self._used = end
        return pinned.copy_(source).to(self._device, non_blocking=True)
