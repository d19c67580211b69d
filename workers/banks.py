"""Banks: slots in runs that one grouped GEMM can index (torch's grouped_mm refuses 1,024 groups and more on CUDA).

Where slots hold quantised experts, the few in use are made whole beside them, some at a time, and computed with there:
it costs a pass through the GPU's own memory, some 77 times faster than the link that they came over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from workers.blob import BlobLayout
from workers.seam import SlotExperts

BANK_SLOTS = 1000
WHOLE_AT_ONCE = 16


class Bank:
    """An experts module over slots, uint8 [S, blob_bytes], S up to 1,000."""

    def __init__(self, module: nn.Module, layout: BlobLayout, slots: torch.Tensor) -> None:
        self._module = module
        self._layout = layout
        self._slots = slots
        self._in_place = None
        if slots.device.type == "cuda" and not layout.is_quantised:
            self._in_place = SlotExperts(module, layout.views(slots))

    def forward(
        self, hidden: torch.Tensor, slots: torch.Tensor, used: Sequence[int], counts: Sequence[int]
    ) -> torch.Tensor:
        """hidden [n, H], slots [n] in ascending order -> [n, H]. used: which slots these are, as the host knows them;
        counts: how many rows each has.

        On a GPU nothing is copied where nothing is quantised; empty groups cost nothing there. On a CPU the grouped
        product takes its time for each group, empty or not: there the few in use are gathered.
        """
        if self._in_place is not None:
            return self._in_place.forward(hidden, slots)
        out = torch.empty_like(hidden)
        begin = 0
        for start in range(0, len(used), WHOLE_AT_ONCE):
            stop = start + WHOLE_AT_ONCE
            end = begin + sum(counts[start:stop])
            out[begin:end] = self._gathered(used[start:stop], counts[start:stop], hidden[begin:end])
            begin = end
        return out

    def _gathered(self, used: Sequence[int], counts: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], in turn through the experts in the slots `used`, counts of them each."""
        blobs = torch.stack([self._slots[slot] for slot in used])
        which = torch.cat([torch.full((count,), place, device=hidden.device) for place, count in enumerate(counts)])
        return SlotExperts(self._module, self._layout.read(blobs)).forward(hidden, which)

    def weighted(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], slots and weights [n, K] -> [n, H], on a GPU whose slots are not quantised."""
        assert self._in_place is not None
        return self._in_place.weighted(hidden, slots, weights)


def make_banks(module: nn.Module, layout: BlobLayout, slots: torch.Tensor) -> list[Bank]:
    """Banks of 1,000 slots each."""
    return [Bank(module, layout, part) for part in torch.split(slots, BANK_SLOTS)]
