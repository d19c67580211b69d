"""How many bits an expert's weights take, in a blob and so on the link: the arithmetic that `fit` and workers share.

A quantised matrix [outputs, inputs] is its payload, then its scales, bfloat16, each part on a 16-byte line:

- int8: a byte a weight, [outputs, inputs]; a scale an output channel, its largest weight / 127;
- int4: two weights a byte, the even input in the low half, each as value + 8, every row on a whole byte; a scale for 64
  inputs of an output channel, their largest weight / 7.

A weight is value * scale. Vectors (biases) stay as they are. Blobs are multiples of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

PART_ALIGNMENT, BLOB_ALIGNMENT = 16, 256
SCALE_BYTES = 2
INT4_GROUP = 64


class Precision(StrEnum):
    """How experts are kept outside the computing: as the model computes with them, or quantised."""

    STORED = "stored"
    INT8 = "int8"
    INT4 = "int4"


def aligned(num_bytes: int, alignment: int) -> int:
    """The next multiple of alignment."""
    return -(-num_bytes // alignment) * alignment


def payload_bytes(precision: Precision, outputs: int, inputs: int) -> int:
    """Of a quantised matrix, without its scales."""
    return outputs * (inputs if precision is Precision.INT8 else -(-inputs // 2))


def num_scales(precision: Precision, outputs: int, inputs: int) -> int:
    """Of a quantised matrix."""
    return outputs * (1 if precision is Precision.INT8 else -(-inputs // INT4_GROUP))


def matrix_bytes(precision: Precision, outputs: int, inputs: int) -> int:
    """A quantised matrix in a blob: payload and scales, each on a 16-byte line."""
    scales = SCALE_BYTES * num_scales(precision, outputs, inputs)
    return aligned(payload_bytes(precision, outputs, inputs), PART_ALIGNMENT) + aligned(scales, PART_ALIGNMENT)


def quantised_blob_bytes(precision: Precision, matrices: Iterable[tuple[int, int]]) -> int:
    """One expert of these matrices [outputs, inputs]."""
    return aligned(sum(matrix_bytes(precision, *matrix) for matrix in matrices), BLOB_ALIGNMENT)
