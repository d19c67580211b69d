"""What one rank computes of one layer: tokens through the experts that lie here, wave by wave, from slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from workers.banks import BANK_SLOTS, Bank, make_banks
from workers.blob import BlobLayout
from workers.few_tokens import Fused, fit_words, fused_for, most_pairs, words_of
from workers.passage import NOTHING
from workers.slot_cache import SlotCache
from workers.staging import Staging
from workers.wave import Wave


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
        self._few_pairs = most_pairs(layout, cache.num_experts) if few_pairs is None else few_pairs
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
        known: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """hidden [n, H], experts [n, K] (-1: not here), weights [n, K] -> their weighted sums [n, H].

        alone: every expert is here. On a GPU whose slots hold them all nothing is looked up then, and nothing waits.
        ahead [n, K]: the experts that these tokens will probably need in the next layer. known [n, K]: experts, where
        the host has them since the device's last work.
        """
        self._find_slots()
        fused = self._fused if experts.numel() <= self._few_pairs else None
        if alone and hidden.device.type == "cuda":
            out = self._without_lookup(fused, hidden, experts, weights)
            if out is not None:
                self.pairs += experts.numel()
                return out
        # Without `known`, the one time that the host waits for the device: which experts does the layer need?
        wanted = ([] if known is not None else [experts]) + ([] if ahead is None else [ahead])
        found = self._staging.fetch(*wanted, meanwhile=self._cache.use_the_time)
        chosen = found[0] if known is None else known.reshape(-1)
        foreseen = NOTHING if ahead is None else found[-1]
        if experts.device != hidden.device:
            experts = self._staging.send(chosen.reshape(experts.shape))
        self.pairs += len(chosen) if alone else int((chosen >= 0).sum())
        if fused is not None:
            out = self._few(fused, hidden, experts, chosen, foreseen, weights)
        else:
            out = self._many(hidden, experts, chosen, foreseen, weights)
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
            self._alone: tuple[int, int, Bank] | None = None
            self._generation = self._cache.generation

    def touch(self, hidden: torch.Tensor, top_k: int) -> None:
        """Run the kernels once on what is in the first slot; the cache does not notice. hidden [n, H]."""
        self._find_slots()
        first = torch.zeros((len(hidden), top_k), dtype=torch.int64, device=hidden.device)
        if self._fused is not None:
            # As they come from routers, and as they travel.
            for dtype in (torch.int64, torch.int32):
                weights = torch.ones_like(first, dtype=torch.float32)
                self._fused(hidden, first.to(dtype), first[0], weights, self._partial_dtype)
                if fit_words(first.numel(), self._cache.num_slots):
                    words = words_of(np.zeros(first.numel(), np.int64))
                    self._fused(hidden, first.to(dtype), words, weights, self._partial_dtype)
        self._banks[0].forward(hidden, first[:, 0], [0], [len(hidden)])

    def _without_lookup(
        self, fused: Fused | None, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """None where not all experts are in slots, or they can't be computed with as they lie there."""
        if fused is None and self._layout.is_quantised:
            return None
        whole = self._cache.whole(self._layer)
        if whole is None:
            return None
        if fused is not None:
            return fused(hidden, experts, whole.slots, weights, self._partial_dtype)
        # Side by side, as they lie after the warm-up: the product is slower the more groups it has.
        if whole.stop - whole.start > BANK_SLOTS:
            return None
        if self._alone is None or self._alone[:2] != (whole.start, whole.stop):
            slots = self._cache.slots[whole.start : whole.stop]
            self._alone = whole.start, whole.stop, Bank(self._module, self._layout, slots)
        return self._alone[2].weighted(hidden, whole.inside[experts.long()], weights.to(hidden.dtype))

    def _few(
        self,
        fused: Fused,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        chosen: NDArray[np.int64],
        foreseen: NDArray[np.int64],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Two launches a wave. Of very few pairs they carry the slots themselves."""
        total: torch.Tensor | None = None
        in_words = fit_words(len(chosen), self._cache.num_slots)
        stages = () if in_words else (self._staging.send, self._staging.show)
        with closing(self._cache.waves(self._layer, chosen, foreseen, *stages)) as waves:
            for wave in waves:
                where = words_of(wave.slots[chosen]) if in_words else wave.there
                part = fused(hidden, experts, where, weights, self._partial_dtype)
                total = part if total is None else total + part
        return torch.zeros(hidden.shape, dtype=self._partial_dtype, device=hidden.device) if total is None else total

    def _many(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        chosen: NDArray[np.int64],
        foreseen: NDArray[np.int64],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The grouped product a wave and bank. Which rows it takes is found out on the device."""
        top_k = weights.shape[1]
        ids, weight = experts.reshape(-1).long(), weights.reshape(-1)
        rows_of = np.bincount(chosen[chosen >= 0], minlength=1)
        partial = torch.zeros(hidden.shape, dtype=self._partial_dtype, device=hidden.device)
        with closing(self._cache.waves(self._layer, chosen, foreseen, self._staging.send)) as waves:
            for wave in waves:
                slots, where = torch.sort(wave.there[ids])
                begin = len(ids) - int(rows_of[wave.experts].sum())
                for bank, used, counts in _by_bank(wave, rows_of):
                    end = begin + sum(counts)
                    pairs = where[begin:end]
                    tokens = pairs // top_k
                    inside = slots[begin:end] - bank * BANK_SLOTS
                    out = self._banks[bank].forward(hidden[tokens], inside, used, counts)
                    partial.index_add_(0, tokens, (out * weight[pairs].unsqueeze(1)).to(partial.dtype))
                    begin = end
        return partial


def _by_bank(wave: Wave, rows_of: NDArray[np.int64]) -> Iterator[tuple[int, list[int], list[int]]]:
    """For each bank that a wave uses, in ascending order: the slots within it, ascending too, and the rows of each.
    rows_of [E]: (token, expert) pairs by expert."""
    experts = np.array(wave.experts)
    slots = wave.slots[experts]
    order = np.argsort(slots)
    slots, rows = slots[order], rows_of[experts[order]]
    for bank in np.unique(slots // BANK_SLOTS).tolist():
        inside = slots // BANK_SLOTS == bank
        yield bank, (slots[inside] % BANK_SLOTS).tolist(), rows[inside].tolist()
