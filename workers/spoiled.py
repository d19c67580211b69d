"""Tokens of a step that lack an expert: it can't be read from disk where it lies.

A rank that can't compute its part of a token's sum sends NaN for it, since the others wait for its sums anyway. Home
takes the token's sum as zero, so that nothing spreads through the KV cache, and fails the token's request, alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class SpoiledTokens:
    """watch: whether any rank has a disk tier; without, nothing is looked for."""

    def __init__(self, *, watch: bool) -> None:
        self._watch = watch
        self._rows: torch.Tensor | None = None

    def clean(self, sums: torch.Tensor) -> torch.Tensor:
        """A layer's sums [T, H] without those that are spoiled, whose tokens are noted."""
        if not self._watch or len(sums) == 0:
            return sums
        spoiled = sums.isnan().any(dim=1)
        self._rows = spoiled if self._rows is None else self._rows | spoiled
        return sums.masked_fill(spoiled.unsqueeze(1), 0.0)

    def take(self) -> NDArray[np.int64]:
        """The tokens noted since the last call, by their place in the step."""
        rows, self._rows = self._rows, None
        return np.zeros(0, np.int64) if rows is None else rows.nonzero().flatten().cpu().numpy()
