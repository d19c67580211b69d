"""Quantised weights: symmetric, the largest weight of a channel or group at the end of the range, no calibration.

What is written is documented with its arithmetic in `placement.fit.precision`. Scales are rounded up to bfloat16 before
weights are divided by them, so that no weight leaves the range. The same weights give the same bytes on every rank.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from placement.fit.precision import INT4_GROUP, Precision

LARGEST = {Precision.INT8: 127, Precision.INT4: 7}
INT4_ZERO = 8


def quantise(weights: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] -> payload, int8 [outputs, inputs] or uint8 [outputs, inputs / 2], and scales, bfloat16
    [outputs, 1] or [outputs, inputs / 64], both rounded up. Raises ValueError for weights that are not finite."""
    weights = weights.float()
    if not weights.isfinite().all():
        raise ValueError("holds weights that are not finite, which can't be quantised")
    outputs, inputs = weights.shape
    group = inputs if precision is Precision.INT8 else INT4_GROUP
    groups = functional.pad(weights, (0, -inputs % group)).view(outputs, -1, group)
    scales = _bfloat16_up(groups.abs().amax(dim=2) / LARGEST[precision])
    values = (groups / scales.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).round()
    values = values.view(outputs, -1)[:, :inputs].to(torch.int8)
    return (values if precision is Precision.INT8 else _pack(values)), scales


def dequantise(
    payload: torch.Tensor, scales: torch.Tensor, precision: Precision, *, inputs: int, dtype: torch.dtype
) -> torch.Tensor:
    """payload and scales of n matrices [n, outputs, ...] -> [n, outputs, inputs] in dtype."""
    if precision is Precision.INT8:
        return payload.to(dtype) * scales.to(dtype)
    values = torch.stack((payload & 15, payload >> 4), dim=3).flatten(2)[:, :, :inputs].to(dtype) - INT4_ZERO
    if inputs % INT4_GROUP == 0:
        return (torch.unflatten(values, 2, (-1, INT4_GROUP)) * scales.to(dtype).unsqueeze(3)).flatten(2)
    return values * scales.to(dtype).repeat_interleave(INT4_GROUP, dim=2)[:, :, :inputs]


def _bfloat16_up(values: torch.Tensor) -> torch.Tensor:
    """Float32, none below 0, to the next bfloat16 that is not smaller."""
    return ((values.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """int8 [outputs, inputs] from -7 to 7 -> uint8 [outputs, inputs / 2], the even input in the low half."""
    halves = functional.pad(values + INT4_ZERO, (0, values.shape[1] % 2)).view(torch.uint8)
    return halves[:, 0::2] | (halves[:, 1::2] << 4)
