"""Pinned host memory as a GPU's kernels see it.

Small copies to a GPU wait in its copy engine for the large ones that were given before them, on whatever stream. A
kernel that reads host memory itself waits for none.
"""

from __future__ import annotations

import torch

TYPES = {torch.int32: "<i4", torch.int64: "<i8"}


class _Memory:
    """What torch asks to make a tensor over memory that it does not own (CUDA array interface, version 3)."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": TYPES[pinned.dtype],
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def device_view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """The same memory as a tensor of a GPU; None where torch or the driver does not have it so. pinned: contiguous."""
    try:
        with torch.cuda.device(device):
            view = torch.as_tensor(_Memory(pinned), device=device)
        seen = view.data_ptr() == pinned.data_ptr() and torch.equal((view + 1).cpu(), pinned + 1)
    except (RuntimeError, TypeError, ValueError):
        return None
    return view if seen else None
