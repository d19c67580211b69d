"""One layer's experts, computed from slots, against the module's own forward."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.fit.precision import Precision
from tests.workers.layers import fill_at_random
from tests.workers.test_model_seam import CONFIGS
from workers import expert_compute
from workers.banks import BANK_SLOTS
from workers.blob import layout_of, round_trip
from workers.expert_compute import ExpertCompute
from workers.host_slab import HostSlab
from workers.links import DirectLink
from workers.seam import experts_modules
from workers.slot_cache import SlotCache

EXPERTS = 6


@pytest.mark.parametrize(
    ("num_slots", "precision"),
    [*((slots, "stored") for slots in (1, 3, 6, BANK_SLOTS + 4)), (3, "int8"), (BANK_SLOTS + 4, "int8"), (3, "int4")],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_from_slots_gives_what_the_module_gives(name: str, num_slots: int, precision: Precision) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval().requires_grad_(False)
    modules = experts_modules(model)
    layout = layout_of(modules[0], EXPERTS, Precision(precision))
    slab = HostSlab(capacity=EXPERTS * len(modules), blob_bytes=layout.num_bytes)
    fill_at_random(slab, layout, modules, EXPERTS)
    for module in modules:
        round_trip(module, EXPERTS, Precision(precision))
    cache = SlotCache(
        slab=slab,
        policy=EvictionPolicy(PolicyName.REUSE, num_layers=len(modules), num_experts=EXPERTS, top_k=2, share=0.5),
        link=DirectLink(),
        num_slots=num_slots,
        blob_bytes=layout.num_bytes,
        device=torch.device("cpu"),
        one_wave=2,
    )
    for layer, module in enumerate(modules):
        compute = ExpertCompute(layer=layer, module=module, layout=layout, cache=cache, partial_dtype=torch.float64)
        hidden = torch.randn(7, 32)
        chosen = torch.rand(7, EXPERTS).topk(2).indices
        weights = torch.rand(7, 2)
        expected = module(hidden, chosen, weights)
        assert torch.allclose(compute(hidden, chosen, weights).float(), expected, rtol=1e-4, atol=1e-5)
        elsewhere = torch.where(chosen == 0, -1, chosen)
        without = module(hidden, chosen, torch.where(chosen == 0, 0.0, weights))
        assert torch.allclose(compute(hidden, elsewhere, weights).float(), without, rtol=1e-4, atol=1e-5)
        assert compute.pairs == 14 + int((elsewhere >= 0).sum())


def test_the_fused_kernels_that_serve_were_touched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[tuple[type, torch.dtype]] = set()

    def fused(
        hidden: torch.Tensor, experts: torch.Tensor, where: object, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        used.add((type(where), experts.dtype))
        return torch.zeros(hidden.shape, dtype=dtype)

    monkeypatch.setattr(expert_compute, "fused_for", lambda *arguments: fused)
    model = AutoModelForCausalLM.from_config(CONFIGS["olmoe"], dtype=torch.float32).eval().requires_grad_(False)
    modules = experts_modules(model)
    layout = layout_of(modules[0], EXPERTS)
    slab = HostSlab(capacity=EXPERTS, blob_bytes=layout.num_bytes)
    fill_at_random(slab, layout, modules[:1], EXPERTS)
    cache = SlotCache(
        slab=slab,
        policy=EvictionPolicy(PolicyName.REUSE, num_layers=1, num_experts=EXPERTS, top_k=2, share=0.5),
        link=DirectLink(),
        num_slots=EXPERTS,
        blob_bytes=layout.num_bytes,
        device=torch.device("cpu"),
    )
    compute = ExpertCompute(
        layer=0, module=modules[0], layout=layout, cache=cache, partial_dtype=torch.float32, few_pairs=32
    )
    compute.touch(torch.zeros(1, 32), 2)
    touched = set(used)
    used.clear()
    for tokens in (1, 8, 9):
        compute(torch.randn(tokens, 32), torch.rand(tokens, EXPERTS).topk(2).indices, torch.rand(tokens, 2))
    assert {kind for kind, _ in used} == {tuple, torch.Tensor}
    assert used <= touched
