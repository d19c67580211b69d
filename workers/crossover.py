"""The crossover: from how many missing experts on a layer is streamed, measured on this machine before it serves.

Missing experts that go through the slots like any others put out as many that are there; those that stream through two
landing groups leave the cache as it is, but each copy waits for the group before it to be computed. So a layer streams
from the number of missing experts where that costs no more than 5% of its time.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from workers.blob import BlobLayout
from workers.expert_compute import ExpertCompute
from workers.host_slab import HostSlab
from workers.links import Link
from workers.slot_cache import STREAM_FROM, SlotCache, landing_group_of

SIZES = (24, 32, 48, 64, 96, 128)
COSTS_AT_MOST = 1.05
REPEATS = 3


def measure_crossover(
    *,
    slab: HostSlab,
    layout: BlobLayout,
    module: nn.Module,
    link: Link,
    device: torch.device,
    num_slots: int,
    num_experts: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> int:
    """How many missing experts a layer streams from; 48 where slots or experts are too few to find out.

    num_experts: of a layer, on all ranks. Some seconds at most; nothing of it stays.
    """
    here = [item for item in slab.experts() if slab.is_ready(item)]
    layer = max({item.layer for item in here}, key=lambda layer: sum(item.layer == layer for item in here), default=0)
    experts = sorted(item.expert for item in here if item.layer == layer)
    streamed = 2 * landing_group_of(layout.num_bytes)
    sizes = [size for size in SIZES if streamed < size <= min(len(experts), num_slots)]
    if not sizes:
        return STREAM_FROM
    seconds: dict[bool, list[float]] = {}
    for streams in (False, True):
        cache = SlotCache(
            slab=slab,
            policy=EvictionPolicy(
                PolicyName.LRU, num_layers=layer + 1, num_experts=num_experts, top_k=1, share=num_slots / len(here)
            ),
            link=link,
            num_slots=sizes[-1],
            blob_bytes=layout.num_bytes,
            device=device,
            stream_from=0 if streams else len(experts) + 1,
            stream_share=1.0,
            prefetch_share=0.0,
        )
        compute = ExpertCompute(
            layer=layer,
            module=module,
            layout=layout,
            cache=cache,
            partial_dtype=torch.float32,
        )
        hidden = torch.zeros((sizes[-1], hidden_size), dtype=dtype, device=device)
        seconds[streams] = [
            _median_seconds(compute, cache, layer, hidden[:size], experts[:size]) for size in (sizes[0], *sizes)
        ][1:]
    return choose_crossover(sizes, seconds[False], seconds[True])


def choose_crossover(sizes: list[int], demand_s: list[float], stream_s: list[float]) -> int:
    """The least of the sizes from which on streaming is hardly slower; beyond the largest where it never is."""
    chosen = sizes[-1] + 1
    for size, demand, stream in sorted(zip(sizes, demand_s, stream_s, strict=True), reverse=True):
        if stream > COSTS_AT_MOST * demand:
            break
        chosen = size
    return chosen


def _median_seconds(
    compute: ExpertCompute, cache: SlotCache, layer: int, hidden: torch.Tensor, experts: list[int]
) -> float:
    """A layer in which every expert is missing, one token each."""
    chosen = torch.tensor(experts, device=hidden.device).unsqueeze(1)
    weights = torch.ones(chosen.shape, device=hidden.device)
    found = []
    for _ in range(REPEATS):
        for expert in experts:
            cache.forget(ExpertId(layer, expert))
        _wait(hidden.device)
        begun = time.perf_counter()
        compute(hidden, chosen, weights)
        _wait(hidden.device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
