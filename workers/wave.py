"""Waves: experts of one layer that lie in slots at the same time, and the tables that tell the device where."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# How a table comes to the device. On a GPU a small copy to the device waits for the large ones that were given before
# it, on whatever stream: tables go first.
Stage = Callable[[NDArray[np.int64]], torch.Tensor]
Group = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Wave:
    """slots [E + 1 or more]: where the experts lie; what else it says of experts that the layer needs is -1, the last
    too, for the expert -1. It holds until the next wave. there: the same on the device."""

    experts: list[int]
    slots: NDArray[np.int64]
    there: torch.Tensor


def grouped(missing: deque[int], free: deque[int], most: int) -> list[Group]:
    """Groups of up to `most` experts and the slots that they go to, as far as there are free ones; both queues are used
    up alike."""
    groups: list[Group] = []
    while missing and free:
        size = min(most, len(missing), len(free))
        groups.append(([missing.popleft() for _ in range(size)], [free.popleft() for _ in range(size)]))
    return groups


def staged(groups: Sequence[Group], num_experts: int, stage: Stage) -> list[Wave]:
    """A wave for each group of (experts, slots), their tables sent as one."""
    # Each begins where 16 bytes end: kernels are compiled anew for arguments that do not.
    tables = np.full((len(groups), num_experts + 1 + (num_experts + 1) % 2), -1, np.int64)
    for table, (experts, slots) in zip(tables, groups, strict=True):
        table[experts] = slots
    sent = stage(tables)
    return [Wave(experts, tables[row], sent[row]) for row, (experts, _) in enumerate(groups)]
