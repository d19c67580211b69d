"""Device memory: one budget for the KV cache, the slots and a step's own tensors.

On a GPU the allocator says no by itself; on a CPU what is taken is counted against a budget, so that the same happens
there. Both say it with `torch.OutOfMemoryError`.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch


class Memory(Protocol):
    """What a rank may use of its device."""

    def claim(self, what: str, num_bytes: int) -> None:
        """`what` takes so many bytes from now on, in place of what it took. Raises torch.OutOfMemoryError."""

    def free_bytes(self) -> float:
        """Bytes that could be had now."""


class CountedMemory:
    """A budget on a device that has none of its own. limit_bytes may change at any time, as when others take memory."""

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.limit_bytes = limit_bytes
        self._taken: dict[str, int] = {}

    def claim(self, what: str, num_bytes: int) -> None:
        others = sum(taken for name, taken in self._taken.items() if name != what)
        # What gets smaller always may.
        if others + num_bytes > self.limit_bytes and num_bytes > self._taken.get(what, 0):
            raise torch.OutOfMemoryError(
                f"{what}: {num_bytes} bytes beside {others} in use are more than the budget of {self.limit_bytes:.0f}"
            )
        self._taken[what] = num_bytes

    def free_bytes(self) -> float:
        return self.limit_bytes - sum(self._taken.values())


class CudaMemory:
    """A GPU, as far as this process may use it (`torch.cuda.set_per_process_memory_fraction`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def claim(self, what: str, num_bytes: int) -> None:
        return

    def free_bytes(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        allowed = torch.cuda.get_per_process_memory_fraction(self._device) * total - reserved
        return min(free, allowed) + reserved - torch.cuda.memory_allocated(self._device)


def memory_of(device: torch.device, limit_bytes: float | None) -> Memory:
    """limit_bytes: what this process may use; None for all that the device has."""
    if device.type != "cuda":
        return CountedMemory(math.inf if limit_bytes is None else limit_bytes)
    if limit_bytes is not None:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    return CudaMemory(device)
