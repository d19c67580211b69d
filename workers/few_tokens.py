"""Whether a layer's experts can be computed by the fused kernels, and from how few tokens on that is faster."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from workers.blob import BlobLayout

# (token, expert) pairs of a step. On an H200 with OLMoE's shapes both took as long at about 200, and quantised, where
# the grouped product must make experts whole first, at over 1,000 (docs/offload.md).
FEW_PAIRS = 128
PAIRS_QUANTISED = 1024

Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def fused_for(module: nn.Module, layout: BlobLayout, slots: torch.Tensor) -> Fused | None:
    """The fused experts over slots: None without CUDA or Triton, or for modules that compute anything else."""
    if slots.device.type != "cuda" or importlib.util.find_spec("triton") is None or not is_plain_gated(module, layout):
        return None
    fused: Fused = importlib.import_module("workers.fused_kernel").FusedExperts(layout, slots)
    return fused


def most_pairs(layout: BlobLayout) -> int:
    """The most pairs for which the fused kernels are faster than the grouped product."""
    return PAIRS_QUANTISED if layout.is_quantised else FEW_PAIRS


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
