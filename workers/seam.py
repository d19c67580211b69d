"""The model seam: Transformers runs the model, Moetis runs the experts.

Transformers lets a function take over the experts of its MoE architectures by name (`ExpertsInterface`). Each experts
module of a model is handed to one callable that gets `hidden_states [T, H]`, `top_k_index [T, K]`,
`top_k_weights [T, K]` and gives back `[T, H]`. The maths of an expert stays Transformers' own grouped forward, run on
slot views in place of the module's parameters, so layouts, biases and activations are those of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from placement.errors import ConfigError

IMPLEMENTATION = "moetis"
_ATTRIBUTE = "_moetis_layer"

LayerFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def experts_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The experts modules of a model, in layer order. Raises ConfigError where Transformers offers no such seam."""
    found = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not found:
        raise ConfigError(
            f"model type '{model.config.model_type}' has no experts module behind Transformers' ExpertsInterface; "
            f"it is not a Mixture-of-Experts model, or not one that Moetis can serve"
        )
    return found


def num_experts_of(module: nn.Module) -> int:
    """E of an experts module."""
    return int(module.num_experts)  # type: ignore[arg-type]


def drop_expert_weights(module: nn.Module) -> None:
    """Put empty tensors in the place of an experts module's per-expert parameters."""
    num_experts = num_experts_of(module)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[0] == num_experts:
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))


def take_over(model: PreTrainedModel, layers: list[LayerFunction]) -> None:
    """Let layers[i] compute the experts of the model's i-th MoE layer, and free the module's own expert weights."""
    modules = experts_modules(model)
    assert len(layers) == len(modules)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    for module, layer in zip(modules, layers, strict=True):
        object.__setattr__(module, _ATTRIBUTE, layer)
        drop_expert_weights(module)
    model.set_experts_implementation(IMPLEMENTATION)


def _forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    layer: LayerFunction = getattr(module, _ATTRIBUTE)
    return layer(hidden_states, top_k_index, top_k_weights)


class SlotExperts:
    """An experts module whose per-expert tensors are slot views: what Transformers' grouped forward calls `self`."""

    def __init__(self, module: nn.Module, views: dict[str, torch.Tensor]) -> None:
        self._module = module
        self.__dict__.update(views)
        self.num_experts = next(iter(views.values())).shape[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], slots [n] -> [n, H]: each row through the expert in its slot, unweighted."""
        ones = torch.ones((len(slots), 1), dtype=hidden.dtype, device=hidden.device)
        return self.weighted(hidden, slots.unsqueeze(1), ones)

    def weighted(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], slots and weights [n, K] -> [n, H]: the weighted sum, as Transformers adds it."""
        out: torch.Tensor = grouped_mm_experts_forward(self, hidden, slots, weights)
        return out
