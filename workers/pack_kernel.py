"""`workers.packing.pack` in one launch (Triton, CUDA)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def pack(rows: torch.Tensor, hidden: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor) -> None:
    """As `workers.packing.pack`."""
    num_tokens, top_k = weights.shape
    hidden_size = hidden.shape[1]
    label = rows[:, hidden_size:]
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    _pack[(len(rows), triton.cdiv(hidden_size, BLOCK))](
        rows, label.view(torch.int32), label.view(torch.float32), rows.stride(0), label.view(torch.int32).stride(0),
        hidden, hidden.stride(0), codes.contiguous(), weights.contiguous(), num_tokens,
        HIDDEN=hidden_size, TOP_K=top_k, LANES=triton.next_power_of_2(top_k + 1), BLOCK=BLOCK,
    )  # fmt: skip


# The number of tokens changes from step to step: no kernel of its own for some of them.
@triton.jit(do_not_specialize=["num_tokens"])
def _pack(  # type: ignore[no-untyped-def]
    rows, words, floats, row_stride, word_stride, hidden, hidden_stride, codes, weights, num_tokens,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # What there is to read of the row: nothing where it has no token.
    size = tl.where(row < num_tokens, HIDDEN, 0)
    shares = tl.where(row < num_tokens, TOP_K, 0)
    state = tl.load(hidden + row * hidden_stride + at, mask=at < size, other=0.0)
    tl.store(rows + row * row_stride + at, state, mask=at < HIDDEN)
    if tl.program_id(1) == 0:
        lane = tl.arange(0, LANES)
        code = tl.load(codes + row * (TOP_K + 1) + lane, mask=lane < TOP_K + 1)
        tl.store(words + row * word_stride + lane, code, mask=lane < TOP_K + 1)
        weight = tl.load(weights + row * TOP_K + lane, mask=lane < shares, other=0.0).to(tl.float32)
        tl.store(floats + row * word_stride + TOP_K + 1 + lane, weight, mask=lane < TOP_K)
