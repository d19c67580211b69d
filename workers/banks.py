"""Banks: slots in runs that one grouped GEMM can index (torch's grouped_mm refuses 1,024 groups and more on CUDA)."""

from __future__ import annotations

import torch
from torch import nn

from workers.blob import BlobLayout
from workers.seam import SlotExperts

BANK_SLOTS = 1000


class Bank:
    """An experts module over slots, uint8 [S, blob_bytes], S up to 1,000."""

    def __init__(self, module: nn.Module, layout: BlobLayout, slots: torch.Tensor) -> None:
        self._module = module
        self._views = layout.views(slots)
        self._experts = SlotExperts(module, self._views)

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], slots [n] -> [n, H]. On a GPU nothing is copied; empty groups cost nothing there.

        On a CPU the grouped product takes its time for each group, empty or not: there the few in use are gathered.
        """
        if hidden.device.type == "cuda":
            return self._experts.forward(hidden, slots)
        used, index = torch.unique(slots, return_inverse=True)
        gathered = {name: view[used] for name, view in self._views.items()}
        return SlotExperts(self._module, gathered).forward(hidden, index)

    def weighted(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], slots and weights [n, K] -> [n, H], on a GPU."""
        return self._experts.weighted(hidden, slots, weights)


def make_banks(module: nn.Module, layout: BlobLayout, slots: torch.Tensor) -> list[Bank]:
    """Banks of 1,000 slots each."""
    return [Bank(module, layout, part) for part in torch.split(slots, BANK_SLOTS)]
