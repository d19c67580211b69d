"""Expert layers for tests: random weights in a model's modules, and the same in a host slab."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from placement.core import ExpertId
from workers.blob import BlobLayout
from workers.host_slab import HostSlab


def fill_at_random(slab: HostSlab, layout: BlobLayout, modules: Sequence[nn.Module], num_experts: int) -> None:
    """Draw the modules' weights, and put each expert of each layer into the slab."""
    for layer, module in enumerate(modules):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        for expert in range(num_experts):
            layout.pack(module, expert, slab.claim(ExpertId(layer, expert)))
            slab.publish(ExpertId(layer, expert))
