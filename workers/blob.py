"""One blob an expert: every tensor that the experts module keeps per expert, end to end in one run of bytes.

The layout is read off the module (weights, biases, transposed or not), so that no architecture's habits are assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobField:
    """One per-expert tensor: its parameter name, the shape of one expert's part, its dtype and its byte offset."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobLayout:
    """Where the tensors of one expert lie in its blob. num_bytes is a multiple of 256."""

    fields: tuple[BlobField, ...]
    num_bytes: int

    def pack(self, experts: nn.Module, expert: int, out: torch.Tensor) -> None:
        """Copy one expert's tensors into out, uint8 [num_bytes]."""
        for field in self.fields:
            source = experts.get_parameter(field.name).detach()[expert]
            target = out[field.offset : field.offset + field.num_bytes].view(field.dtype).view(field.shape)
            target.copy_(source)

    def views(self, blobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed strided views [n, *shape] into blobs, uint8 [n, num_bytes]; nothing is copied."""
        return {field.name: _view(blobs, field) for field in self.fields}


def _view(blobs: torch.Tensor, field: BlobField) -> torch.Tensor:
    typed = blobs[:, field.offset : field.offset + field.num_bytes].view(field.dtype)
    return torch.unflatten(typed, 1, field.shape)


def layout_of(experts: nn.Module, num_experts: int) -> BlobLayout:
    """The layout of an experts module: its own parameters whose first dimension is the expert, in name order."""
    fields: list[BlobField] = []
    offset = 0
    for name, parameter in sorted(experts.named_parameters(recurse=False)):
        if parameter.shape[0] == num_experts:
            field = BlobField(name=name, shape=tuple(parameter.shape[1:]), dtype=parameter.dtype, offset=offset)
            fields.append(field)
            offset += -(-field.num_bytes // 16) * 16
    return BlobLayout(fields=tuple(fields), num_bytes=-(-offset // ALIGNMENT) * ALIGNMENT)
