"""Expert layers alone, without attention: a stack in OLMoE's expert shape on every rank, with routing that is given.

Every rank holds every expert in slots, so that a placement decides only who computes what, and can be changed at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from multigpu_crew import Crew
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, OlmoeConfig

from placement.baselines import linear_placement
from placement.core import ExpertId, Placement
from placement.topology import Topology, load_topology
from workers.blob import layout_of
from workers.group import Group
from workers.parallel_model import ParallelModel
from workers.recorder import Recorder, RecorderOptions
from workers.seam import drop_expert_weights, experts_modules
from workers.step_clock import StepClock

POOL = 16


class _Pool:
    """Random experts: a few different blobs in turn."""

    def __init__(self, module: torch.nn.Module, num_experts: int, crew: Crew) -> None:
        self.layout = layout_of(module, num_experts)
        torch.manual_seed(3)
        blobs = torch.zeros((POOL, self.layout.num_bytes), dtype=torch.uint8, device=crew.device)
        for view in self.layout.views(blobs).values():
            view.normal_(0, 0.02)
        self._blobs = blobs.cpu()

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        out.copy_(self._blobs[(expert.layer * 7 + expert.expert) % POOL])


class Stack:
    """num_layers x num_experts, all of them here. hidden_size and expert_bytes are those of what was built."""

    def __init__(self, crew: Crew, *, num_layers: int, num_experts: int, top_k: int) -> None:
        hidden, inner = (2048, 1024) if crew.cuda else (32, 16)
        config = OlmoeConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            vocab_size=64,
            eos_token_id=None,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=crew.dtype)
        pool = _Pool(experts_modules(model)[0], num_experts, crew)
        for module in experts_modules(model):
            drop_expert_weights(module)
        self.crew = crew
        self.hidden_size, self.expert_bytes = hidden, pool.layout.num_bytes
        self.shape = (num_layers, num_experts, top_k)
        self.everywhere = linear_placement(num_layers, num_experts, crew.num_ranks, num_experts)
        self.parallel = ParallelModel(
            model.to_empty(device=crew.device),
            experts=pool,
            placement=self.everywhere,
            topology=load_topology(f"1x{crew.num_ranks}"),
            rank=crew.rank,
            device=crew.device,
            cache_share=1.0,
            host_slab_rows=1.0,
        )
        self.parallel.table.warm_up()
        self.parallel.cache.warm_up(sorted(self.parallel.slab.experts()))
        self._recorder = Recorder(
            RecorderOptions(folder=None), rank=0, num_layers=num_layers, num_experts=num_experts, top_k=top_k, model=""
        )

    def serve(self, placement: Placement, topology: Topology, data: Group) -> None:
        """Compute by a placement from now on, over a group."""
        self.parallel.table.take_seat(self.crew.rank, topology, placement)
        self.parallel.cache.let_go()
        self.parallel.attach(data, self._recorder, StepClock())

    def step(self, ids: torch.Tensor, most_tokens: int) -> torch.Tensor:
        """A residual stack over ids [L, T, K] on the device; hidden states are made here. Returns [T, H]."""
        _, num_tokens, top_k = ids.shape
        hidden = torch.ones((num_tokens, self.hidden_size), dtype=self.crew.dtype, device=self.crew.device)
        weights = torch.full((num_tokens, top_k), 1 / top_k, dtype=self.crew.dtype, device=self.crew.device)
        self.parallel.table.expect(most_tokens)
        self.parallel.table.begin_step()
        with torch.no_grad():
            for layer, chosen in zip(self.parallel.layers, ids, strict=True):
                hidden = hidden + layer(hidden, chosen, weights)
        return hidden

    def random_ids(self, num_tokens: int, seed: int) -> torch.Tensor:
        num_layers, num_experts, top_k = self.shape
        scores: NDArray[Any] = np.random.default_rng(seed).random((num_layers, num_tokens, num_experts))
        return torch.from_numpy(np.argsort(scores, axis=2)[:, :, :top_k].copy()).to(self.crew.device)


def stack_of(crew: Crew, *, num_layers: int, num_experts: int, top_k: int) -> Stack:
    """One stack for all stages that want the same; it takes its time to fill."""
    for stack in crew.keep:
        if isinstance(stack, Stack) and stack.shape == (num_layers, num_experts, top_k):
            return stack
    stack = Stack(crew, num_layers=num_layers, num_experts=num_experts, top_k=top_k)
    crew.keep.append(stack)
    return stack
