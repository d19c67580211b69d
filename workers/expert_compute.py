"""What one rank computes of one layer: tokens through the experts that lie here, wave by wave, from slots."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from workers.banks import BANK_SLOTS, make_banks
from workers.blob import BlobLayout
from workers.few_tokens import Fused, fused_for, most_pairs
from workers.slot_cache import NOTHING, SlotCache
from workers.staging import Staging


class ExpertCompute:
    """The experts of MoE layer `layer` in a cache's slots. partial_dtype: in which a token's experts are summed.

    few_pairs: steps of so many (token, expert) pairs run through the fused kernels where they can; as was measured to
    pay unless given.
    """

    def __init__(
        self,
        *,
        layer: int,
        module: nn.Module,
        layout: BlobLayout,
        cache: SlotCache,
        partial_dtype: torch.dtype,
        few_pairs: int | None = None,
    ) -> None:
        self._layer = layer
        self._module = module
        self._layout = layout
        self._cache = cache
        self._partial_dtype = partial_dtype
        self._few_pairs = most_pairs(layout) if few_pairs is None else few_pairs
        self._staging = Staging(cache.slots.device)
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
        self._find_slots()
        fused = self._fused if experts.numel() <= self._few_pairs else None
        if alone and hidden.device.type == "cuda":
            out = self._without_lookup(fused, hidden, experts, weights)
            if out is not None:
                self.pairs += experts.numel()
                return out
        # The one time that the host waits for the device: which experts does the layer need?
        chosen, foreseen = _to_host(experts, ahead)
        self._staging.begin()
        self.pairs += len(chosen) if alone else int((chosen >= 0).sum())
        if fused is not None:
            out = self._few(fused, hidden, chosen, foreseen, weights)
        else:
            out = self._many(hidden, chosen, foreseen, weights)
        lost = self._cache.take_lost()
        if lost:
            # The mark of a sum that can't be had; see workers/spoiled.py.
            rows = np.isin(chosen, lost).reshape(experts.shape).any(axis=1)
            out[torch.from_numpy(rows).to(out.device)] = float("nan")
        return out

    def _find_slots(self) -> None:
        if self._generation != self._cache.generation:
            self._banks = make_banks(self._module, self._layout, self._cache.slots)
            self._fused = fused_for(self._module, self._layout, self._cache.slots)
            self._generation = self._cache.generation

    def touch(self, hidden: torch.Tensor, top_k: int) -> None:
        """Run the kernels once on what is in the first slot; the cache does not notice. hidden [n, H]."""
        self._find_slots()
        slots = np.zeros((len(hidden), top_k), np.int64)
        sent = torch.from_numpy(slots).to(hidden.device)
        if self._fused is not None:
            self._fused(hidden, sent, torch.ones(slots.shape, device=hidden.device), self._partial_dtype)
        self._banks[0].forward(hidden, sent[:, 0], slots[:, 0])

    def _without_lookup(
        self, fused: Fused | None, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """None where not all experts are in slots, or they can't be computed with as they lie there."""
        if fused is None and (len(self._banks) > 1 or self._layout.is_quantised):
            return None
        table = self._cache.whole_table(self._layer)
        if table is None:
            return None
        slots = table[experts.long()]
        if fused is not None:
            return fused(hidden, slots, weights, self._partial_dtype)
        return self._banks[0].weighted(hidden, slots, weights.to(hidden.dtype))

    def _few(
        self,
        fused: Fused,
        hidden: torch.Tensor,
        chosen: NDArray[np.int64],
        foreseen: NDArray[np.int64],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Two launches a wave."""
        total: torch.Tensor | None = None
        with closing(self._cache.waves(self._layer, chosen, foreseen)) as waves:
            for wave in waves:
                slots = self._staging.send(wave.slots[chosen].reshape(weights.shape))
                part = fused(hidden, slots, weights, self._partial_dtype)
                total = part if total is None else total + part
        return torch.zeros(hidden.shape, dtype=self._partial_dtype, device=hidden.device) if total is None else total

    def _many(
        self, hidden: torch.Tensor, chosen: NDArray[np.int64], foreseen: NDArray[np.int64], weights: torch.Tensor
    ) -> torch.Tensor:
        """The grouped product a wave and bank."""
        top_k = weights.shape[1]
        weight = weights.reshape(-1)
        partial = torch.zeros(hidden.shape, dtype=self._partial_dtype, device=hidden.device)
        with closing(self._cache.waves(self._layer, chosen, foreseen)) as waves:
            for wave in waves:
                for bank, where, slots in self._by_bank(wave.slots[chosen]):
                    table = self._staging.send(np.stack([where, where // top_k, slots]))
                    out = self._banks[bank].forward(hidden[table[1]], table[2], slots)
                    partial.index_add_(0, table[1], (out * weight[table[0]].unsqueeze(1)).to(partial.dtype))
        return partial

    def _by_bank(self, slots: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """slots [n * K], -1 where an expert is not of this wave. For each bank that a wave uses: where its experts are
        among them, and their slots within the bank."""
        where = np.flatnonzero(slots >= 0)
        slots = slots[where]
        if len(self._banks) == 1:
            return [(0, where, slots)]
        banks = slots // BANK_SLOTS
        return [(int(bank), where[banks == bank], slots[banks == bank] % BANK_SLOTS) for bank in np.unique(banks)]


def _to_host(experts: torch.Tensor, ahead: torch.Tensor | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids [n * K] that are needed, and those that are foreseen, in one copy."""
    if ahead is None:
        return experts.cpu().numpy().reshape(-1).astype(np.int64, copy=False), NOTHING
    wanted = experts.reshape(-1)
    known = (
        torch.cat((wanted, ahead.reshape(-1).to(wanted.device, wanted.dtype)))
        .cpu()
        .numpy()
        .astype(np.int64, copy=False)
    )
    return known[: len(wanted)], known[len(wanted) :]
