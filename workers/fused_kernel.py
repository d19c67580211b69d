"""The experts of few tokens in two launches: gate, up and activation; then down and the weighted sum (Triton, CUDA).

A decode step of one token is bound by launches, of which the grouped product takes some twenty; these kernels read the
slots where they lie, quantised or not. Products are summed in float32; gate, up, activation and each expert's output
are rounded to the model's type where the module would round them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from placement.fit.precision import INT4_GROUP, Precision
from workers.blob import BlobField, BlobLayout
from workers.few_tokens import NO_WORDS, Words
from workers.kernel_launch import Launcher, aligned

WORDS = ["first", "second", "third", "fourth"]
KINDS = {Precision.STORED: 0, Precision.INT8: 1, Precision.INT4: 2}


class FusedExperts:
    """Gated experts in slots, uint8 [S, blob_bytes]: fields gate_up_proj [2I, H] and down_proj [H, I], no biases."""

    def __init__(self, layout: BlobLayout, slots: torch.Tensor) -> None:
        fields = {field.name: field for field in layout.fields}
        self._up = _arguments(fields["gate_up_proj"], slots)
        self._down = _arguments(fields["down_proj"], slots)
        self._hidden, self._width = fields["down_proj"].shape
        self._sizes = (self._hidden, self._width, INT4_GROUP)
        self._blocks = triton.cdiv(self._width, UP_BLOCK[0]), triton.cdiv(self._hidden, DOWN_BLOCK[0])
        self._middle = torch.empty((0, self._width), dtype=slots.dtype, device=slots.device)
        self._gate_up = Launcher(_gate_up, num_warps=WARPS)
        self._down_sum = Launcher(_down, num_warps=WARPS)

    def __call__(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        where: torch.Tensor | Words,
        weights: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """hidden [n, H], experts [n, K] (-1: none), where: the slot of each expert (-1: none; the table may lie in
        pinned host memory) or of each pair, weights [n, K] -> the weighted sums [n, H]."""
        tokens, top_k = experts.shape
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        experts, weights = experts.contiguous(), weights.contiguous()
        if len(self._middle) < tokens * top_k or self._middle.dtype != hidden.dtype:
            self._middle = torch.empty((tokens * top_k, self._width), dtype=hidden.dtype, device=hidden.device)
        middle = self._middle
        given = isinstance(where, tuple)
        table, words = (experts, where) if isinstance(where, tuple) else (where, NO_WORDS)
        out = torch.empty((tokens, self._hidden), dtype=out_dtype, device=hidden.device)
        if tokens == 0:
            return out
        up_blocks, down_blocks = self._blocks
        key = None
        if aligned(hidden.data_ptr(), experts.data_ptr(), table.data_ptr(), weights.data_ptr()):
            key = (hidden.dtype, hidden.stride(0), experts.dtype, table.dtype, given, top_k, weights.dtype, out_dtype)
        self._gate_up(
            (tokens * top_k, up_blocks, 1), key,
            hidden, hidden.stride(0), experts, table, *words, given, *self._up, middle, top_k, *self._sizes, *UP_BLOCK,
        )  # fmt: skip
        self._down_sum(
            (tokens, down_blocks, 1), key,
            middle, experts, table, *words, given, weights, *self._down, out, top_k, 1 << (top_k - 1).bit_length(),
            *self._sizes, *DOWN_BLOCK,
        )  # fmt: skip
        return out


# Rows and columns of a block.
UP_BLOCK = (8, 512)
DOWN_BLOCK = (4, 1024)
WARPS = 4


def _arguments(field: BlobField, slots: torch.Tensor) -> tuple[Any, ...]:
    """Weights, what a slot is away from the next in them; scales likewise; and how to read them."""
    if field.precision is Precision.STORED:
        weights = scales = field.stored(slots)
    else:
        weights, scales = field.quantised(slots)
    return weights, weights.stride(0), scales, scales.stride(0), KINDS[field.precision]


@triton.jit
def _rows_times(  # type: ignore[no-untyped-def]
    weights, scales, rows, x,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """[OUT] float32: rows of one matrix times the vector at x."""
    total = tl.zeros([OUT, IN], tl.float32)
    if KIND == 2:
        row_bytes: tl.constexpr = (INPUTS + 1) // 2
        groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        for start in range(0, row_bytes, IN):
            at = start + tl.arange(0, IN)
            even = tl.load(x + 2 * at, mask=2 * at < INPUTS, other=0.0).to(tl.float32)
            odd = tl.load(x + 2 * at + 1, mask=2 * at + 1 < INPUTS, other=0.0).to(tl.float32)
            inside = (at < row_bytes)[None, :]
            both = tl.load(weights + rows[:, None] * row_bytes + at[None, :], mask=inside, other=0)
            scale = tl.load(scales + rows[:, None] * groups + (2 * at // GROUP)[None, :], mask=inside, other=0.0)
            low = (both & 15).to(tl.float32) - 8.0
            high = (both >> 4).to(tl.float32) - 8.0
            total += (low * even[None, :] + high * odd[None, :]) * scale.to(tl.float32)
        result = tl.sum(total, axis=1)
    else:
        for start in range(0, INPUTS, IN):
            at = start + tl.arange(0, IN)
            value = tl.load(x + at, mask=at < INPUTS, other=0.0).to(tl.float32)
            weight = tl.load(weights + rows[:, None] * INPUTS + at[None, :], mask=(at < INPUTS)[None, :], other=0)
            total += weight.to(tl.float32) * value[None, :]
        result = tl.sum(total, axis=1)
        if KIND == 1:
            result = result * tl.load(scales + rows).to(tl.float32)
    return result


@triton.jit
def _slot_in(first, second, third, fourth, pair):  # type: ignore[no-untyped-def]
    """Where a pair's expert lies, -1 for nowhere, as the words say."""
    word = tl.where(pair < 4, first, tl.where(pair < 8, second, tl.where(pair < 12, third, fourth)))
    return ((word >> (pair % 4 * 16)) & 0xFFFF) - 1


@triton.jit(do_not_specialize=WORDS)
def _gate_up(  # type: ignore[no-untyped-def]
    hidden, token_stride, experts, table,
    first: tl.int64, second: tl.int64, third: tl.int64, fourth: tl.int64, GIVEN: tl.constexpr,
    weights, slot_weights, scales, slot_scales, KIND: tl.constexpr, middle,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """middle[pair, rows] = silu(gate) * up."""
    pair = tl.program_id(0)
    if GIVEN:
        slot = _slot_in(first, second, third, fourth, pair)
    else:
        expert = tl.load(experts + pair)
        slot = tl.load(table + expert, mask=expert >= 0, other=-1).to(tl.int64)
    if slot >= 0:
        kind = middle.dtype.element_ty
        row = tl.program_id(1) * OUT + tl.arange(0, OUT)
        here = tl.minimum(row, WIDTH - 1)
        x = hidden + (pair // TOP_K) * token_stride
        matrix, scale = weights + slot * slot_weights, scales + slot * slot_scales
        gate = _rows_times(matrix, scale, here, x, HIDDEN, KIND, GROUP, OUT, IN).to(kind).to(tl.float32)
        up = _rows_times(matrix, scale, here + WIDTH, x, HIDDEN, KIND, GROUP, OUT, IN).to(kind).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        tl.store(middle + pair * WIDTH + row, (active * up).to(kind), mask=row < WIDTH)


@triton.jit(do_not_specialize=WORDS)
def _down(  # type: ignore[no-untyped-def]
    middle, experts, table,
    first: tl.int64, second: tl.int64, third: tl.int64, fourth: tl.int64, GIVEN: tl.constexpr,
    shares, weights, slot_weights, scales, slot_scales, KIND: tl.constexpr, out,
    TOP_K: tl.constexpr, KS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """out[token, rows] = the sum over the token's experts of share * down."""
    token = tl.program_id(0)
    row = tl.program_id(1) * OUT + tl.arange(0, OUT)
    here = tl.minimum(row, HIDDEN - 1)
    kind = middle.dtype.element_ty
    if not GIVEN:
        # All at once: the table may lie in host memory, which is far away.
        ks = tl.arange(0, KS)
        chosen = tl.load(experts + token * TOP_K + ks, mask=ks < TOP_K, other=-1)
        slots = tl.load(table + chosen, mask=chosen >= 0, other=-1).to(tl.int64)
    total = tl.zeros([OUT], tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        slot = _slot_in(first, second, third, fourth, pair) if GIVEN else tl.sum(tl.where(ks == k, slots, 0), axis=0)
        if slot >= 0:
            matrix, scale = weights + slot * slot_weights, scales + slot * slot_scales
            part = _rows_times(matrix, scale, here, middle + pair * WIDTH, WIDTH, KIND, GROUP, OUT, IN)
            total += part.to(kind).to(tl.float32) * tl.load(shares + pair).to(tl.float32)
    tl.store(out + token * HIDDEN + row, total.to(out.dtype.element_ty), mask=row < HIDDEN)
