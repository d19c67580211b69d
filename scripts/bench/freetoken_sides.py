"""The two sides of `beside_freetoken.py`: our expert cache, and FreeToken's (github.com/FlashML-org/FreeToken,
Apache-2.0) over the experts of the same bench. Nothing of it is kept here: it is imported when a run asks for it.

FreeToken keeps an expert as rows of two banks, pinned, and one LRU over all layers on the device: a kernel looks up and
makes room, a second one reads the missing rows out of host memory. Nothing comes back to the host, so that its engine
captures whole steps in CUDA graphs; both ways are measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from placement.core import ExpertId
from scripts.bench.offload import CUDA, DEVICE, Bench, _sync
from workers.blob import BlobLayout
from workers.few_tokens import Fused
from workers.mapped import device_view
from workers.pinning import host_memory
from workers.slot_cache import SlotCache
from workers.staging import Staging

EXTENSION = "freetoken.kernel._pinned_tensor"
# The experts of a token in `miss_nothing`.
ONE_TOKEN = 8
# Its name of each bank, and the parameter that lies there.
BANKS = {"gate_up": "gate_up_proj", "down": "down_proj"}


class Ours:
    """Lookups and copies alone, as `ExpertCompute` asks for them."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self._staging = Staging(DEVICE)

    def layer(self, layer: int, ids: torch.Tensor) -> None:
        """ids [n, K] int64 on the device."""
        chosen = self._staging.fetch(ids, meanwhile=self.cache.use_the_time)[0]
        send, show = self._staging.send, self._staging.show
        with closing(self.cache.waves(layer, chosen, stage=send, show=show)) as waves:
            for _ in waves:
                pass

    def step(self, ids: torch.Tensor) -> None:
        """ids [L, n, K]."""
        for layer, chosen in enumerate(ids):
            self.layer(layer, chosen)

    def has(self, items: list[ExpertId]) -> None:
        """Let these experts lie in the slots, and no others."""
        self.cache.catch_up()
        kept = set(items)
        for layer, expert in self.where():
            if ExpertId(layer, expert) not in kept:
                self.cache.forget(ExpertId(layer, expert))
        self.cache.warm_up(items)
        # As the layer before leaves it.
        self.cache._slots.table.rank_ahead(self.cache.num_experts)

    def miss_nothing(self) -> None:
        """A layer whose experts are all in slots, after `has` with experts of layer 1."""
        self.layer(1, torch.arange(ONE_TOKEN, device=DEVICE).unsqueeze(0))

    def where(self) -> dict[tuple[int, int], int]:
        """The slot of each (layer, expert) that has one."""
        table = self.cache._slots.table
        layers = range(len(table.slot_at))
        return {(layer, expert): table.slot_at[layer, expert] for layer in layers for expert in table.in_layer(layer)}


def why_not(folder: Path | None) -> str | None:
    """What a run lacks, in one sentence; None where it lacks nothing. folder: where FreeToken's package lies, if Python
    does not find it by itself."""
    if folder is not None:
        sys.path.append(str(folder))
    if not CUDA:
        return "this bench needs CUDA and FreeToken 0.1.2, and torch finds no GPU here"
    try:
        importlib.import_module("freetoken.moe.offload_cache")
    except ImportError as error:
        return f"this bench needs CUDA and FreeToken 0.1.2 (--freetoken FOLDER, with what it imports): {error}"
    if importlib.util.find_spec(EXTENSION) is None:
        sys.modules[EXTENSION] = _extension()
    return None


def _extension() -> types.ModuleType:
    """What its cache asks of an extension that is only built where FreeToken is installed: whether a GPU finds pinned
    memory where the host has it."""
    found = types.ModuleType(EXTENSION)
    probe = torch.zeros(16, dtype=torch.int64).pin_memory()
    vars(found)["host_ptr_identity"] = lambda: device_view(probe, DEVICE) is not None
    return found


def banks_of(bench: Bench) -> dict[str, list[torch.Tensor]]:
    """For each layer [E, 2I, H] and [E, H, I] in pinned host memory: what its cache copies from."""
    banks = {}
    for bank, name in BANKS.items():
        weights = [layer.get_parameter(name) for layer in bench.resident]
        shape, kind = weights[0].shape, weights[0].dtype
        held = host_memory(len(weights) * shape[0], weights[0][0].numel() * kind.itemsize, pin=CUDA).rows
        banks[bank] = list(held.view(kind).view(len(weights), *shape).unbind())
        for targets, sources in zip(banks[bank], weights, strict=True):
            # A layer may lie in two registrations, from which CUDA does not copy as one.
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
    return banks


# 32 streams, 8 experts each.
MOST_IDS = 256


def freetoken_cache(bench: Bench, banks: dict[str, list[torch.Tensor]], num_slots: int) -> Any:
    """Its cache as its engine makes it for bf16 experts, but for the size of two buffers."""
    found = importlib.import_module("freetoken.moe.offload_cache").OffloadMoeCache(
        num_layers=bench.trace.num_layers,
        num_experts=bench.trace.num_experts,
        cache_size=num_slots,
        device=DEVICE,
        quant_format="bf16",
    )
    found.set_bank_sources(banks)
    # As they are it refuses, at 32 streams, more ids than a layer has experts, in its own benchmark too.
    most = max(MOST_IDS, bench.trace.num_experts)
    for plan in ("src_indices", "evict_slots"):
        setattr(found, plan, torch.empty(most, dtype=torch.int32, device=DEVICE))
    return found


class Rival:
    """What is done with a cache of FreeToken's. State is what its cache says of its slots, and their bytes."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def layer(self, layer: int, ids: torch.Tensor) -> None:
        """ids [n, K] int32 on the device: afterwards the slots, which hold the experts by then."""
        self.cache.ensure_experts(layer, ids)
        self.cache.copy_missing()

    def step(self, ids: torch.Tensor) -> None:
        """ids [L, n, K], as in `layer`."""
        for layer, chosen in enumerate(ids):
            self.layer(layer, chosen)

    def computed(self, fused: Fused, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same with the experts' sums behind each layer, as `offload.run_step` has them."""
        slots = torch.arange(self.cache.cache_size, device=ids.device)
        for layer, chosen in enumerate(ids):
            self.layer(layer, chosen)
            hidden = hidden + fused(hidden, chosen, slots, weights, torch.float32).to(hidden.dtype)
        return hidden

    def has(self, cached: int) -> None:
        """Say that the first `cached` experts of layer 0 lie in the first slots and experts of other layers in all
        others; their bytes stay as they are."""
        cache = self.cache
        slots = torch.arange(cache.cache_size, dtype=torch.int32, device=cache.id_of_slot.device)
        items = torch.where(slots < cached, slots, slots + (cache.num_experts - cached))
        cache.slot_for_id.fill_(-1)
        cache.slot_for_id.view(-1)[items.long()] = slots
        cache.id_of_slot.copy_(items)
        cache.usage.copy_(slots + 1)
        cache.step.fill_(cache.cache_size + 1)

    def miss_nothing(self) -> None:
        """A layer whose experts are all in slots, after `has`."""
        self.layer(1, torch.arange(ONE_TOKEN, dtype=torch.int32, device=DEVICE).unsqueeze(0))

    def state(self) -> list[torch.Tensor]:
        """A copy of it."""
        return [tensor.clone() for tensor in self._state()]

    def restore(self, state: list[torch.Tensor]) -> None:
        for tensor, saved in zip(self._state(), state, strict=True):
            tensor.copy_(saved)

    def _state(self) -> list[torch.Tensor]:
        cache = self.cache
        return [cache.slot_for_id, cache.id_of_slot, cache.usage, cache.step, *cache.bank_caches.values()]

    def counted(self) -> tuple[int, int]:
        """Experts that were needed and that were missing since the counters were last cleared, layer by layer."""
        needed, missing, _ = self.cache.lru_stats.sum(dim=0).tolist()
        return needed, missing

    def views(self) -> dict[str, torch.Tensor]:
        """The slots [S, ...] by the name of the parameter in them."""
        return {name: self.cache.bank_caches[bank] for bank, name in BANKS.items()}

    def where(self) -> dict[tuple[int, int], int]:
        """The slot of each (layer, expert) that has one."""
        rows = enumerate(self.cache.slot_for_id.tolist())
        return {(layer, expert): slot for layer, row in rows for expert, slot in enumerate(row) if slot >= 0}


def fused_over(layout: BlobLayout, rival: Rival) -> Fused:
    """Our fused kernels over its slots, whose parameters lie in banks of their own."""
    from workers.fused_kernel import FusedExperts, _arguments

    class OverBanks(FusedExperts):
        def __init__(self) -> None:
            super().__init__(layout, torch.zeros((1, layout.num_bytes), dtype=torch.uint8, device=DEVICE))
            fields = {field.name: replace(field, offset=0) for field in layout.fields}
            rows = {name: slots.flatten(1).view(torch.uint8) for name, slots in rival.views().items()}
            self._up = _arguments(fields["gate_up_proj"], rows["gate_up_proj"])
            self._down = _arguments(fields["down_proj"], rows["down_proj"])

    return OverBanks()


def graph_of(
    rival: Rival, run: Callable[[torch.Tensor], Any], ids: torch.Tensor
) -> Callable[[torch.Tensor], Any] | None:
    """What copies ids to where a captured run finds them, replays it, and gives what it gave; None where it can't be
    captured: with more ids than slots flashlib counts the distinct ones on the host. The state stays."""
    if not CUDA or ids.shape[-2] * ids.shape[-1] > rival.cache.cache_size:
        return None
    given, before = ids.int(), rival.state()
    run(given)  # Compiles its kernels.
    rival.restore(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given)

    def again(ids: torch.Tensor) -> Any:
        given.copy_(ids)
        graph.replay()
        return out

    return again


def clocked(run: Callable[[torch.Tensor], Any], steps: Sequence[torch.Tensor]) -> tuple[list[float], Any]:
    """Seconds of each step, from an idle device to an idle device, and what the last one gave."""
    seconds, out = [], None
    for ids in steps:
        _sync()
        begun = time.perf_counter()
        out = run(ids)
        _sync()
        seconds.append(time.perf_counter() - begun)
    return seconds, out


def num_wrong(bench: Bench, views: dict[str, torch.Tensor], where: dict[tuple[int, int], int]) -> int:
    """How many (layer, expert) do not lie in the slots where they are said to lie, bit for bit."""
    return sum(
        any(
            not torch.equal(slots[slot], bench.resident[layer].get_parameter(name)[expert])
            for name, slots in views.items()
        )
        for (layer, expert), slot in where.items()
    )
