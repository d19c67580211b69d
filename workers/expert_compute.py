"""What one rank computes of one layer: tokens through the experts that lie here, wave by wave, from slots."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from workers.banks import BANK_SLOTS, make_banks
from workers.blob import BlobLayout
from workers.slot_cache import SlotCache


class ExpertCompute:
    """The experts of MoE layer `layer` in a cache's slots. partial_dtype: in which a token's experts are summed."""

    def __init__(
        self,
        *,
        layer: int,
        module: nn.Module,
        layout: BlobLayout,
        cache: SlotCache,
        num_experts: int,
        partial_dtype: torch.dtype,
    ) -> None:
        self._layer = layer
        self._module = module
        self._layout = layout
        self._cache = cache
        self._partial_dtype = partial_dtype
        self._slot_of = np.full(num_experts + 1, -1, np.int64)
        self._generation = -1
        self.pairs = 0

    def __call__(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        *,
        alone: bool = False,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [n, H], experts [n, K] (-1: not here), weights [n, K] -> their weighted sums [n, H].

        alone: every expert is here. On a GPU whose slots hold them all nothing is looked up then, and nothing waits.
        ahead [n, K]: the experts that these tokens will probably need in the next layer.
        """
        if self._generation != self._cache.generation:
            self._banks = make_banks(self._module, self._layout, self._cache.slots)
            self._generation = self._cache.generation
        if alone and hidden.device.type == "cuda" and len(self._banks) == 1:
            table = self._cache.whole_table(self._layer)
            whole = None
            if table is not None:
                whole = self._banks[0].weighted(hidden, table[experts.long()], weights.to(hidden.dtype))
            if whole is not None:
                self.pairs += experts.numel()
                return whole
        # The one time that the host waits for the device: which experts does the layer need?
        wanted = experts.reshape(-1)
        known = (wanted if ahead is None else torch.cat((wanted, ahead.reshape(-1).to(wanted.dtype)))).cpu().numpy()
        chosen, foreseen = np.split(known, [len(wanted)])
        top_k = experts.shape[1]
        weight = weights.reshape(-1)
        partial = torch.zeros(hidden.shape, dtype=self._partial_dtype, device=hidden.device)
        needed = np.unique(chosen)
        self.pairs += int((chosen >= 0).sum())
        for number, wave in enumerate(self._cache.waves(self._layer, needed[needed >= 0].tolist())):
            # What the layer waits for is on its way by now. A GPU gets its work first, and computes meanwhile.
            if number == 0 and hidden.device.type != "cuda":
                self._fetch_ahead(foreseen)
            for bank, where, slots in self._by_bank(wave.slot_of, chosen):
                table = torch.from_numpy(np.stack([where, where // top_k, slots])).to(hidden.device, non_blocking=True)
                out = self._banks[bank].forward(hidden[table[1]], table[2], slots)
                partial.index_add_(0, table[1], (out * weight[table[0]].unsqueeze(1)).to(partial.dtype))
            if number == 0 and hidden.device.type == "cuda":
                self._fetch_ahead(foreseen)
        return partial

    def _fetch_ahead(self, foreseen: NDArray[np.int64]) -> None:
        """foreseen [m]: the ids that a router asked ahead gave, of all tokens; those of most tokens are likeliest."""
        if len(foreseen):
            experts, counts = np.unique(foreseen, return_counts=True)
            self._cache.prefetch(self._layer + 1, experts[np.argsort(-counts, kind="stable")].tolist())

    def _by_bank(
        self, slot_of: dict[int, int], chosen: NDArray[np.int64]
    ) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """For each bank that a wave uses: where in chosen [n * K] its experts are, and their slots within the bank."""
        experts = list(slot_of)
        self._slot_of[experts] = list(slot_of.values())
        slots = self._slot_of[chosen]
        self._slot_of[experts] = -1
        where = np.flatnonzero(slots >= 0)
        slots = slots[where]
        if len(self._banks) == 1:
            return [(0, where, slots)]
        banks = slots // BANK_SLOTS
        return [(int(bank), where[banks == bank], slots[banks == bank] % BANK_SLOTS) for bank in np.unique(banks)]
