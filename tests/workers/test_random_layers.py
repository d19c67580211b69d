"""Layers of any size from slots in any number, over a slow link, some experts unreadable: sums as the module's own."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from placement.fit.precision import Precision
from tests.workers.layers import fill_at_random
from tests.workers.test_model_seam import CONFIGS
from workers import banks, expert_compute
from workers.blob import BlobLayout, layout_of
from workers.expert_compute import ExpertCompute
from workers.host_slab import HostSlab
from workers.seam import SlotExperts, experts_modules
from workers.slot_cache import SlotCache
from workers.thread_link import ThreadLink

EXPERTS, HIDDEN = 6, 32


class _Unreadable(HostSlab):
    """A slab of which some experts can't be read."""

    broken: frozenset[ExpertId] = frozenset()

    def fetch(self, experts: Sequence[ExpertId]) -> list[torch.Tensor | None]:
        found = zip(experts, super().fetch(experts), strict=True)
        return [None if expert in self.broken else blob for expert, blob in found]


def _cache(slab: HostSlab, layout: BlobLayout, num_layers: int, rng: random.Random) -> SlotCache:
    def delay() -> None:
        time.sleep(rng.choice([0, 0, 0, 0, 0, 0.0003]))

    return SlotCache(
        slab=slab,
        policy=EvictionPolicy(PolicyName.REUSE, num_layers=num_layers, num_experts=EXPERTS, top_k=2, share=0.5),
        link=ThreadLink(bytes_per_s=1e9, chunk_bytes=layout.num_bytes // 2 + 1, delay=delay, defers=rng.random() < 0.7),
        num_slots=rng.randint(1, 2 * EXPERTS + 3),
        blob_bytes=layout.num_bytes,
        device=torch.device("cpu"),
        one_wave=rng.choice([0, 2, 16]),
        landing_group=rng.choice([1, 2, 8]),
        stream_from=rng.choice([2, 48]),
        prefetch_share=0.5,
        link_bytes_per_s=math.inf,
    )


def _break_off(cache: SlotCache, layer: int, rng: random.Random) -> None:
    waves = cache.waves(layer, np.array(rng.sample(range(EXPERTS), rng.randint(0, EXPERTS)), np.int64))
    for _ in range(rng.randint(0, 2)):
        next(waves, None)
    waves.close()


@pytest.mark.parametrize("seed", range(48))
def test_sums_are_the_modules_own_but_for_tokens_that_lack_an_expert(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(banks, "WHOLE_AT_ONCE", rng.choice([1, 2, 16]))
    for each in (banks, expert_compute):
        monkeypatch.setattr(each, "BANK_SLOTS", [1, 3, 1000][seed % 3])
    config = CONFIGS[sorted(CONFIGS)[seed % len(CONFIGS)]]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    modules = experts_modules(model)
    layout = layout_of(modules[0], EXPERTS, Precision.STORED)
    slab = _Unreadable(capacity=EXPERTS * len(modules), blob_bytes=layout.num_bytes)
    fill_at_random(slab, layout, modules, EXPERTS)
    cache = _cache(slab, layout, len(modules), rng)
    computes = [
        ExpertCompute(layer=layer, module=module, layout=layout, cache=cache, partial_dtype=torch.float64)
        for layer, module in enumerate(modules)
    ]
    for _ in range(4):
        for layer, (module, compute) in enumerate(zip(modules, computes, strict=True)):
            shape = rng.choice([0, 1, 7]), rng.choice([1, 2, 3])
            hidden, weights = torch.randn(shape[0], HIDDEN), torch.rand(shape)
            chosen = torch.randint(0, EXPERTS, shape)
            chosen[torch.rand(shape) < rng.choice([0.0, 0.4, 1.0])] = -1
            slab.broken = frozenset(ExpertId(layer, expert) for expert in range(rng.choice([0, 0, 3, EXPERTS])))
            cache.catch_up()
            lost = {item.expert for item in slab.broken} - cache.resident(layer)
            ahead = torch.randint(0, EXPERTS, (shape[0], 2)) if rng.random() < 0.5 else None
            compute._find_slots()
            if seed % 2:
                # As on a GPU, where the product indexes the slots themselves.
                for bank in compute._banks:
                    bank._in_place = SlotExperts(module, layout.views(bank._slots))
            out = compute(hidden, chosen, weights, ahead=ahead)
            spoiled = out.isnan().any(dim=1)
            assert spoiled.tolist() == [any(expert in lost for expert in row) for row in chosen.tolist()]
            here = chosen >= 0
            expected = (
                module(hidden, torch.where(here, chosen, 0), torch.where(here, weights, 0.0)) if shape[0] else out
            )
            assert torch.allclose(out[~spoiled].float(), expected[~spoiled].float(), rtol=1e-4, atol=1e-5)
            slab.broken = frozenset()
            if rng.random() < 0.3:
                cache.resize(rng.randint(1, 14))
            elif rng.random() < 0.5:
                _break_off(cache, layer, rng)
    cache.close()
