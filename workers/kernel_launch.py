"""Triton kernels, launched again without another look at their arguments.

Triton finds out at each launch for which types, alignments and constants a kernel must have been compiled, which takes
longer than the launch itself. Whoever launches the same kernel layer after layer knows that already.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

# An address that can be divided by so much is aligned for Triton.
ALIGNED = 16


class Launcher:
    """A kernel and what it was compiled for so far. options: Triton's own, num_warps and the like."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], key: Hashable, *arguments: Any) -> None:
        """arguments: all that the kernel declares, in its order. key: equal only for those that are alike in whatever
        Triton compiles for: types, constants, numbers by which an integer or an address can be divided. None: unknown.
        """
        compiled = None if key is None else self._compiled.get(key)
        if compiled is not None:
            # Of a tensor it would ask the driver where it lies, each time.
            compiled[grid](*[each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments])
            return
        compiled = self._kernel[grid](*arguments, **self._options)
        # Triton's interpreter compiles nothing.
        if key is not None and compiled is not None:
            self._compiled[key] = compiled


def aligned(*addresses: int) -> bool:
    """Whether Triton would take all of them for aligned."""
    return not any(address % ALIGNED for address in addresses)
