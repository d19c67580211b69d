"""Rows of an exchange: a token's hidden state and its label side by side, so that both travel in one call.

A row is the hidden state [H], then 4-byte words: a code for each of the token's experts, the sender's epoch, the
experts' weights, and words of nothing up to a multiple of 16 bytes, as kernels read them best.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import torch

ALIGNED_BYTES = 16
Pack = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def row_elements(hidden_size: int, top_k: int, dtype: torch.dtype) -> int:
    """How many elements of dtype a row takes."""
    label = -(-4 * (2 * top_k + 1) // ALIGNED_BYTES) * ALIGNED_BYTES
    return hidden_size + label // dtype.itemsize


def split_rows(rows: torch.Tensor, hidden_size: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, row_elements] -> hidden [n, H], label [n, 2K + 1] int32; both lie where the rows do."""
    return rows[:, :hidden_size], rows[:, hidden_size:].view(torch.int32)[:, : 2 * top_k + 1]


def pack(rows: torch.Tensor, hidden: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor) -> None:
    """Write hidden [T, H], codes [C, K + 1] int32 and weights [T, K] into rows [C, row_elements]; zeros beyond T."""
    num_tokens, top_k = weights.shape
    states, label = split_rows(rows, hidden.shape[1], top_k)
    states[:num_tokens] = hidden
    states[num_tokens:] = 0
    label[:, : top_k + 1] = codes
    shares = label.view(torch.float32)[:, top_k + 1 :]
    shares[:num_tokens] = weights
    shares[num_tokens:] = 0


def pack_for(device: torch.device) -> Pack:
    """`pack`, or on a GPU its kernel: one launch rather than five."""
    if device.type != "cuda":
        return pack
    return cast(Pack, importlib.import_module("workers.pack_kernel").pack)
