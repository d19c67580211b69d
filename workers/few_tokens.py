"""Whether a layer's experts can be computed by the fused kernels, and from how few tokens on that is faster."""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from placement.fit.precision import Precision
from workers.blob import BlobLayout

# What was measured on an H200 (docs/offload.md). The fused kernels read an expert once for each (token, expert) pair,
# at so many bytes of blobs a second, since most of it comes from the cache:
PAIR_BYTES_PER_S = {Precision.STORED: 7.5e12, Precision.INT8: 3.5e12, Precision.INT4: 0.7e12}
# The grouped product reads an expert once, and takes longer to set off; where experts are quantised it makes each of
# them whole first, one by one.
GROUPED_BYTES_PER_S, GROUPED_S, DEQUANTISED_S = 3e12, 150e-6, 45e-6
DEQUANTISED_PASSES = 2.5
# Beyond that nothing was measured.
MOST_PAIRS, MOST_PAIRS_QUANTISED = 128, 1024

# The slots of up to 16 pairs as numbers with which a kernel is launched, 16 bits each: nothing has to come to the
# device first. 0: none.
Words = tuple[int, int, int, int]
NO_WORDS: Words = (0, 0, 0, 0)
PAIRS_IN_WORDS, SLOTS_IN_WORDS = 16, (1 << 16) - 1
# Through `struct`, since numpy takes twice as long for so few.
_WORDS = struct.Struct("<4q")
_PAIRS = [struct.Struct(f"<{pairs}H{2 * (PAIRS_IN_WORDS - pairs)}x") for pairs in range(PAIRS_IN_WORDS + 1)]

Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | Words, torch.Tensor, torch.dtype], torch.Tensor]


def fit_words(num_pairs: int, num_slots: int) -> bool:
    """Whether words can say where the experts of so many pairs lie among so many slots."""
    return num_pairs <= PAIRS_IN_WORDS and num_slots <= SLOTS_IN_WORDS


def words_of(slots: NDArray[np.int64]) -> Words:
    """slots [n] of pairs that `fit_words`, -1 for none."""
    numbers = [slot + 1 for slot in slots.tolist()]
    first, second, third, fourth = _WORDS.unpack(_PAIRS[len(numbers)].pack(*numbers))
    return first, second, third, fourth


def fused_for(module: nn.Module, layout: BlobLayout, slots: torch.Tensor) -> Fused | None:
    """The fused experts over slots: None without CUDA or Triton, or for modules that compute anything else."""
    if slots.device.type != "cuda" or importlib.util.find_spec("triton") is None or not is_plain_gated(module, layout):
        return None
    fused: Fused = importlib.import_module("workers.fused_kernel").FusedExperts(layout, slots)
    return fused


def most_pairs(layout: BlobLayout, num_experts: int) -> int:
    """The most (token, expert) pairs of a step for which the fused kernels are faster than the grouped product."""
    most = MOST_PAIRS_QUANTISED if layout.is_quantised else MOST_PAIRS
    return next((pairs for pairs in range(most) if not _is_faster(layout, num_experts, pairs + 1)), most)


def _is_faster(layout: BlobLayout, num_experts: int, pairs: int) -> bool:
    distinct = num_experts * (1 - (1 - 1 / num_experts) ** pairs)
    stored = sum(math.prod(field.shape) * field.dtype.itemsize for field in layout.fields)
    precision = next((field.precision for field in layout.fields if field.precision is not Precision.STORED), None)
    if precision is None:
        grouped = distinct * stored / GROUPED_BYTES_PER_S + GROUPED_S
    else:
        grouped = distinct * (DEQUANTISED_S + DEQUANTISED_PASSES * stored / GROUPED_BYTES_PER_S)
    return pairs * layout.num_bytes / PAIR_BYTES_PER_S[precision or Precision.STORED] <= grouped


def is_plain_gated(module: nn.Module, layout: BlobLayout) -> bool:
    """Whether an expert is down(silu(gate(x)) * up(x)) without biases, as most architectures have it."""
    plain = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
    return (
        {field.name for field in layout.fields} == {"gate_up_proj", "down_proj"}
        and all(getattr(module, name, None) is value for name, value in plain.items())
        and not getattr(module, "has_post_expert_norm", False)
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
        and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    )
