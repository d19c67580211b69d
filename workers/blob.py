"""One blob an expert: every tensor that the experts module keeps per expert, end to end in one run of bytes.

The layout is read off the module (weights, biases, transposed or not), so that no architecture's habits are assumed.
Matrices may be kept quantised (`workers.precision`); they are computed with in the module's own type all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from placement.errors import ConfigError
from placement.fit.precision import (
    BLOB_ALIGNMENT,
    PART_ALIGNMENT,
    SCALE_BYTES,
    Precision,
    aligned,
    matrix_bytes,
    num_scales,
    payload_bytes,
)
from workers.precision import dequantise, quantise


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobField:
    """One per-expert tensor: its parameter name, the shape and dtype of one expert's part, and its byte offset.

    precision: of what lies in the blob. transposed: shape is [inputs, outputs]; what is quantised lies in the blob as
    [outputs, inputs] either way.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    precision: Precision = Precision.STORED
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        if self.precision is Precision.STORED:
            return math.prod(self.shape) * self.dtype.itemsize
        return matrix_bytes(self.precision, *self._matrix)

    def write(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Put one expert's tensor into its blob, uint8 [blob_bytes]. Raises ConfigError for what can't be quantised."""
        blob = out.unsqueeze(0)
        if self.precision is Precision.STORED:
            self.stored(blob)[0].copy_(tensor)
            return
        payload, scales = self.quantised(blob)
        try:
            values, scale = quantise(tensor.T if self.transposed else tensor, self.precision)
        except ValueError as error:
            raise ConfigError(f"expert tensor '{self.name}' {error}") from error
        payload[0].copy_(values)
        scales[0].copy_(scale)

    def read(self, blobs: torch.Tensor) -> torch.Tensor:
        """[n, *shape] in the module's dtype of n blobs; a view where nothing is quantised."""
        if self.precision is Precision.STORED:
            return self.stored(blobs)
        payload, scales = self.quantised(blobs)
        weights = dequantise(payload, scales, self.precision, inputs=self._matrix[1], dtype=self.dtype)
        return weights.transpose(1, 2) if self.transposed else weights

    def stored(self, blobs: torch.Tensor) -> torch.Tensor:
        """A strided view [n, *shape] into blobs, uint8 [n, blob_bytes]."""
        return torch.unflatten(self._part(blobs, self.offset, self.num_bytes).view(self.dtype), 1, self.shape)

    def quantised(self, blobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Strided views into blobs: payload [n, outputs, bytes a row] and scales, bfloat16 [n, outputs, groups]."""
        outputs, inputs = self._matrix
        size, scales = payload_bytes(self.precision, outputs, inputs), num_scales(self.precision, outputs, inputs)
        kind = torch.int8 if self.precision is Precision.INT8 else torch.uint8
        payload = self._part(blobs, self.offset, size).view(kind)
        scale = self._part(blobs, self.offset + aligned(size, PART_ALIGNMENT), scales * SCALE_BYTES)
        rows = (outputs, -1)
        return torch.unflatten(payload, 1, rows), torch.unflatten(scale.view(torch.bfloat16), 1, rows)

    @property
    def _matrix(self) -> tuple[int, int]:
        """Outputs and inputs."""
        first, second = self.shape
        return (second, first) if self.transposed else (first, second)

    @staticmethod
    def _part(blobs: torch.Tensor, start: int, size: int) -> torch.Tensor:
        return blobs[:, start : start + size]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobLayout:
    """Where the tensors of one expert lie in its blob. num_bytes is a multiple of 256."""

    fields: tuple[BlobField, ...]
    num_bytes: int

    @property
    def is_quantised(self) -> bool:
        """Whether a blob must be worked on before it can be computed with."""
        return any(field.precision is not Precision.STORED for field in self.fields)

    def pack(self, experts: nn.Module, expert: int, out: torch.Tensor) -> None:
        """Write one expert of a module into out, uint8 [num_bytes]."""
        for field in self.fields:
            field.write(experts.get_parameter(field.name).detach()[expert], out)

    def views(self, blobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed strided views [n, *shape] into blobs, uint8 [n, num_bytes], none of them quantised."""
        return {field.name: field.stored(blobs) for field in self.fields}

    def read(self, blobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors [n, *shape] of blobs, uint8 [n, num_bytes], as the module computes with them."""
        return {field.name: field.read(blobs) for field in self.fields}


def layout_of(experts: nn.Module, num_experts: int, precision: Precision = Precision.STORED) -> BlobLayout:
    """The layout of an experts module: its own parameters whose first dimension is the expert, in name order."""
    fields: list[BlobField] = []
    offset = 0
    for name, parameter in sorted(experts.named_parameters(recurse=False)):
        if parameter.shape[0] == num_experts:
            shape = tuple(parameter.shape[1:])
            is_matrix = len(shape) == 2 and parameter.dtype.is_floating_point
            field = BlobField(
                name=name,
                shape=shape,
                dtype=parameter.dtype,
                offset=offset,
                precision=precision if is_matrix else Precision.STORED,
                transposed=bool(getattr(experts, "is_transposed", False)),
            )
            fields.append(field)
            offset += aligned(field.num_bytes, PART_ALIGNMENT)
    return BlobLayout(fields=tuple(fields), num_bytes=aligned(offset, BLOB_ALIGNMENT))


def round_trip(experts: nn.Module, num_experts: int, precision: Precision) -> None:
    """Give a module the weights that its experts have once they were kept in a precision."""
    layout = layout_of(experts, num_experts, precision)
    if not layout.is_quantised:
        return
    blob = torch.zeros((1, layout.num_bytes), dtype=torch.uint8)
    with torch.no_grad():
        for expert in range(num_experts):
            layout.pack(experts, expert, blob[0])
            for name, tensor in layout.read(blob).items():
                experts.get_parameter(name)[expert].copy_(tensor[0])
