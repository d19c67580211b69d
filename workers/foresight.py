"""Foresight: which experts will the next MoE layer need? Its own router, run on this layer's hidden state, says so.

The hidden state between two layers changes little, so that a router that is asked one layer early is right in most of
what it says (measured in docs/offload.md). Nothing but prefetches depends on it.
"""

from __future__ import annotations

import torch
from torch import nn

from workers.seam import experts_modules, num_experts_of

ROUTER_NAMES = ("gate", "router")


class NextRouter:
    """The router of one MoE layer, asked ahead of its time.

    Routers of Transformers answer with the chosen ids [n, K], among other tensors, or with logits [n, E] alone.
    """

    def __init__(self, router: nn.Module, *, num_experts: int, top_k: int) -> None:
        self._router = router
        self._num_experts = num_experts
        self._top_k = top_k

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden [n, H] -> ids [n, K], on the device; None where the router's answer is not understood."""
        answer = self._router(hidden)
        found: list[torch.Tensor] = list(answer) if isinstance(answer, tuple) else [answer]
        for tensor in found:
            if not tensor.dtype.is_floating_point and tensor.shape == (len(hidden), self._top_k):
                return tensor
        for tensor in found:
            if tensor.dtype.is_floating_point and tensor.shape == (len(hidden), self._num_experts):
                return self._best(tensor)
        return None

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        bias = getattr(self._router, "e_score_correction_bias", None)
        scores = logits if bias is None else logits.float().sigmoid() + bias
        return scores.topk(self._top_k, dim=1).indices


def next_routers(model: nn.Module, *, top_k: int) -> list[NextRouter | None]:
    """For each MoE layer the router of the next; None for the last, and where a layer's router is not found."""
    routers = []
    for module in experts_modules(model):
        block = next(parent for parent in model.modules() if any(child is module for child in parent.children()))
        named = dict(block.named_children())
        router = next((named[name] for name in ROUTER_NAMES if name in named), None)
        count = num_experts_of(module)
        routers.append(None if router is None else NextRouter(router, num_experts=count, top_k=top_k))
    return [*routers[1:], None]
