"""A model whose experts are spread over ranks: Transformers' model here, the experts wherever the placement says."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from placement.cache.policy import EvictionPolicy, PolicyName, compile_policies
from placement.core import Placement
from placement.errors import ConfigError
from placement.fit.sizing import CACHE_ELEMENT_BYTES, kv_bytes_per_request
from placement.tiers import hottest_first
from placement.topology import Topology
from workers.crossover import measure_crossover
from workers.cuda_edge import link_for
from workers.exchange import Exchange
from workers.expert_layer import ExpertLayer
from workers.expert_source import ExpertSource, ModuleExperts
from workers.foresight import next_routers
from workers.gathering import GatherExchange, is_worth_gathering
from workers.group import Group
from workers.links import Link
from workers.loading import check_fits, fill_slab, shape_of
from workers.memory import Memory, memory_of
from workers.recorder import Recorder
from workers.relief import Relief
from workers.routing import RoutingTable
from workers.seam import experts_modules, take_over
from workers.slot_cache import PREFETCH_SHARE, SlotCache
from workers.spoiled import SpoiledTokens
from workers.step_clock import StepClock
from workers.thread_link import ThreadLink

KV_CACHE = "the KV cache"
WARM_UP_TOKENS = (1, 64)


def _claim_model(memory: Memory, model: PreTrainedModel, experts: list[nn.Module]) -> None:
    """What stays beside the slots: all of the model but its routed experts."""
    in_experts = {id(parameter) for module in experts for parameter in module.parameters()}
    kept = (parameter for parameter in model.parameters() if id(parameter) not in in_experts)
    try:
        memory.claim("the model", sum(parameter.numel() * parameter.dtype.itemsize for parameter in kept))
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{error}; raise workers.memory_gb") from error


class ParallelModel:
    """One rank's share of a model: all of it but the experts, of which it reads its own only.

    experts: where they are read; from the model itself, which is then whole, unless given. cache_share: the share of
    the rank's rows that its slots hold. gathers: whether the ranks gather (see `workers/gathering.py`); where it pays,
    unless given. host_slab_rows and the rest: see WorkerOptions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        placement: Placement,
        topology: Topology,
        rank: int,
        device: torch.device,
        cache_share: float,
        host_slab_rows: float,
        prefetch: bool = True,
        link_bytes_per_s: float | None = None,
        memory_bytes: float | None = None,
        experts: ExpertSource | None = None,
        host_budget: int | None = None,
        disk_path: Path | None = None,
        gathers: bool | None = None,
    ) -> None:
        self.model = model
        self._gathers = gathers
        self.shape = shape_of(model)
        check_fits(self.shape, placement)
        self._device = device
        self._modules = experts_modules(model)
        self._next_routers = next_routers(model, top_k=self.shape.top_k)
        source = ModuleExperts(model) if experts is None else experts
        self.layout = source.layout
        self.slab = fill_slab(
            source,
            placement,
            rank=rank,
            spare=host_slab_rows,
            pin=device.type == "cuda",
            budget_bytes=host_budget,
            disk_path=disk_path,
        )
        self.table = RoutingTable(placement=placement, topology=topology, rank=rank, top_k=self.shape.top_k)
        compile_policies()
        num_slots = max(1, math.ceil(cache_share * placement.num_layers * placement.rows_per_rank))
        link = self._link(link_bytes_per_s)
        self.memory = memory_of(device, memory_bytes)
        _claim_model(self.memory, model, self._modules)
        self.cache = SlotCache(
            slab=self.slab,
            policy=EvictionPolicy(
                PolicyName.REUSE,
                num_layers=self.shape.num_layers,
                num_experts=self.shape.num_experts,
                top_k=self.shape.top_k,
                share=cache_share,
            ),
            link=link,
            num_slots=num_slots,
            blob_bytes=self.layout.num_bytes,
            device=device,
            prefetch_share=PREFETCH_SHARE if prefetch else 0.0,
            guesses=all(router is None for router in self._next_routers),
            stream_from=measure_crossover(
                slab=self.slab,
                layout=self.layout,
                module=self._modules[0],
                link=link,
                device=device,
                num_slots=num_slots,
                num_experts=self.shape.num_experts,
                hidden_size=self.shape.hidden_size,
                dtype=model.dtype,
            ),
            memory=self.memory,
            serves=self.table.serves,
        )
        self.spoiled = SpoiledTokens(watch=host_budget is not None)
        self.relief = Relief(self.cache, self.memory, least=self.shape.top_k)
        self._layers: list[ExpertLayer] = []
        self._is_warm = False

    def _link(self, bytes_per_s: float | None) -> Link:
        if bytes_per_s is None:
            return link_for(self._device, self.slab.memory)
        # Chunks as small beside an expert as a GPU's are, so that what is urgent overtakes as soon.
        return ThreadLink(bytes_per_s=bytes_per_s, chunk_bytes=self.layout.num_bytes // 4)

    def attach(self, group: Group, recorder: Recorder, clock: StepClock) -> None:
        """Put expert layers that meet over group in the place of the model's own, and the model on its device."""
        partial_dtype = torch.float64 if self._device.type == "cpu" else torch.float32
        exchange = Exchange(
            group,
            num_ranks=len(self.table.node_of_rank),
            partial_dtype=partial_dtype,
            attempt=self.relief.attempt,
        )
        gathering = self._gathering(group, partial_dtype)
        self._layers = [
            ExpertLayer(
                layer=layer,
                module=module,
                layout=self.layout,
                cache=self.cache,
                exchange=exchange,
                gathering=gathering,
                table=self.table,
                recorder=recorder,
                clock=clock,
                spoiled=self.spoiled,
                hidden_size=self.shape.hidden_size,
                dtype=self.model.dtype,
                device=self._device,
                next_router=self._next_routers[layer],
                relief=self.relief,
                memory=self.memory,
            )
            for layer, module in enumerate(self._modules)
        ]
        take_over(self.model, list(self._layers))
        self.model.to(self._device)

    def warm_up(self) -> None:
        """Touch every kernel, once, and fill the slots with the hottest experts of the placement's tiers. No other rank
        takes part. What is in slots already stays."""
        with torch.no_grad():
            if not self._is_warm:
                for num_tokens in WARM_UP_TOKENS:
                    self._layers[0].touch(num_tokens)
                    self._touch_rest(num_tokens)
                self._is_warm = True
            self.cache.warm_up(hottest_first(self.table.placement, self.table.rank))

    def _touch_rest(self, num_tokens: int) -> None:
        """The model's own kernels: attention, norms, routers, head."""
        take_over(self.model, [lambda hidden, experts, weights: torch.zeros_like(hidden)] * len(self._layers))
        self.model(torch.zeros((1, num_tokens), dtype=torch.int64, device=self._device))
        take_over(self.model, list(self._layers))

    def reserve_kv_cache(self, tokens: int) -> None:
        """Have room for a KV cache of so many tokens; the slots give way. Raises ConfigError."""
        config = self.model.config.get_text_config().to_dict()
        size = kv_bytes_per_request(config, tokens, Path(self.model.name_or_path))
        self.memory.claim(KV_CACHE, 0)
        try:
            self.relief.reserve(KV_CACHE, size * self.model.dtype.itemsize // CACHE_ELEMENT_BYTES)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"memory has no room for a KV cache of {tokens} tokens, even with {self.cache.num_slots} slots for "
                f"experts: {error}; lower workers.kv_pages"
            ) from error

    def _gathering(self, group: Group, partial_dtype: torch.dtype) -> GatherExchange | None:
        nodes = self.table.node_of_rank
        pays = is_worth_gathering(num_ranks=len(nodes), num_nodes=int(nodes[-1]) + 1, top_k=self.shape.top_k)
        # On a CPU bytes cost more than a wait.
        gathers = pays and self._device.type != "cpu" if self._gathers is None else self._gathers and len(nodes) > 1
        if not gathers:
            return None
        return GatherExchange(
            group,
            rank=self.table.rank,
            num_ranks=len(nodes),
            num_experts=self.shape.num_experts,
            partial_dtype=partial_dtype,
            device=self._device,
            attempt=self.relief.attempt,
        )

    @property
    def layers(self) -> list[ExpertLayer]:
        """The expert layers since `attach`, in order."""
        return self._layers

    def join_step(self) -> None:
        """Join the layers of the step under way that this rank has not joined yet, with zero tokens."""
        with torch.no_grad():
            for layer in self._layers[self.table.layers_done :]:
                layer.join_empty()
        self.table.begin_step()
