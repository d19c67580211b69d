"""One MoE layer of one rank: route, dispatch, compute what is here, combine."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from placement.dispatch import choose_ranks
from placement.errors import ExchangeError
from placement.fit.serving import LAYER_BYTES_PER_ELEMENT
from workers.blob import BlobLayout
from workers.exchange import Arrivals, Dispatch, Exchange
from workers.expert_compute import ExpertCompute
from workers.foresight import NextRouter
from workers.gathering import Gathered, GatherExchange
from workers.memory import Memory
from workers.recorder import Recorder
from workers.relief import Relief
from workers.routing import RoutingTable
from workers.slot_cache import SlotCache
from workers.spoiled import SpoiledTokens
from workers.staging import Staging
from workers.step_clock import StepClock


class ExpertLayer:
    """Computes the routed experts of MoE layer `layer` together with the same layer of the other ranks.

    gathering: the exchange for steps in which the ranks have agreed on a number of tokens; None where it does not pay.
    next_router: of the next MoE layer, if there is one that can be asked ahead.
    """

    def __init__(
        self,
        *,
        layer: int,
        module: nn.Module,
        layout: BlobLayout,
        cache: SlotCache,
        exchange: Exchange,
        gathering: GatherExchange | None,
        table: RoutingTable,
        recorder: Recorder,
        clock: StepClock,
        spoiled: SpoiledTokens,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        next_router: NextRouter | None,
        relief: Relief,
        memory: Memory,
    ) -> None:
        self._layer = layer
        self._exchange = exchange
        self._cache = cache
        self._next_router = next_router
        self._relief = relief
        self._memory = memory
        self._gathering = gathering
        self._table = table
        self._recorder = recorder
        self._clock = clock
        self._spoiled = spoiled
        self._compute = ExpertCompute(
            layer=layer,
            module=module,
            layout=layout,
            cache=cache,
            partial_dtype=exchange.partial_dtype,
        )
        self._ids = Staging(device)
        self._nothing = (
            torch.zeros((0, hidden_size), dtype=dtype, device=device),
            torch.zeros((0, table.top_k), dtype=torch.int64, device=device),
            torch.zeros((0, table.top_k), dtype=torch.float32, device=device),
        )

    def __call__(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], top_k_index [T, K] logical ids, top_k_weights [T, K] -> [T, H]."""
        start = time.perf_counter()
        (flat,) = self._ids.fetch(top_k_index, meanwhile=self._cache.use_the_time)
        chosen = flat.reshape(top_k_index.shape)
        self._recorder.record(self._layer, chosen, top_k_weights)
        plan, arrivals = self._dispatch(hidden, top_k_index, chosen, top_k_weights)
        dispatched = time.perf_counter()
        try:
            partial = self._relief.attempt(lambda: self.compute(arrivals))
        except (RuntimeError, LookupError, ValueError) as error:
            # The other ranks wait for these sums: there is no way to fail this rank's part of a layer alone.
            raise ExchangeError(f"layer {self._layer}: this rank could not compute its experts: {error}") from error
        computed = time.perf_counter()
        self._table.count_layer()
        combined = self._spoiled.clean(self._combine(plan, partial, len(hidden))).to(hidden.dtype)
        self._clock.layer(start, dispatched, computed, time.perf_counter())
        return combined

    def touch(self, num_tokens: int) -> None:
        """Run the layer's own kernels once, without the other ranks."""
        nothing, _, _ = self._nothing
        hidden = nothing.new_zeros((num_tokens, nothing.shape[1]))
        self._compute.touch(hidden, self._table.top_k)
        if self._gathering is not None:
            self._gathering.touch(hidden, self._table.top_k)

    def join_empty(self) -> None:
        """Take part in the layer's exchange without a token of one's own: others may need the experts here."""
        self(*self._nothing)

    def _dispatch(
        self, hidden: torch.Tensor, experts: torch.Tensor, chosen: NDArray[np.int64], weights: torch.Tensor
    ) -> tuple[Dispatch | Gathered | None, Arrivals]:
        """No plan where this rank is alone: nothing travels."""
        if self._is_alone:
            self._table.traffic.tokens += len(chosen)
            return None, Arrivals(hidden=hidden, experts=experts, weights=weights.float(), known=chosen)
        ranks = self._ranks_of(chosen)
        epoch, capacity = self._table.epoch, self._table.most_tokens
        if self._gathering is not None and capacity:
            return self._gathering.dispatch(
                epoch=epoch, hidden=hidden, experts=chosen, weights=weights, ranks=ranks, capacity=capacity
            )
        return self._exchange.dispatch(epoch=epoch, hidden=hidden, experts=chosen, weights=weights, ranks=ranks)

    def _combine(self, plan: Dispatch | Gathered | None, partial: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if plan is None:
            return partial
        if isinstance(plan, Gathered):
            assert self._gathering is not None
            return self._gathering.combine(plan, partial, num_tokens)
        return self._exchange.combine(plan, partial, num_tokens)

    @property
    def _is_alone(self) -> bool:
        return len(self._table.node_of_rank) == 1

    def compute(self, arrivals: Arrivals) -> torch.Tensor:
        """The weighted sum over the experts of each arrival that lie here: [n, H] in the exchange's partial dtype."""
        before = self._compute.pairs
        self._memory.claim("a layer", arrivals.experts.numel() * arrivals.hidden.shape[1] * LAYER_BYTES_PER_ELEMENT)
        ahead = None
        if self._next_router is not None and len(arrivals.hidden) and self._cache.ahead.looks_ahead():
            ahead = self._next_router(arrivals.hidden)
        partial = self._compute(
            arrivals.hidden,
            arrivals.experts,
            arrivals.weights,
            alone=self._is_alone,
            ahead=ahead,
            known=arrivals.known,
        )
        self._table.traffic.pairs += self._compute.pairs - before
        self._memory.claim("a layer", 0)
        return partial.to(self._exchange.partial_dtype)

    def _ranks_of(self, chosen: NDArray[np.int64]) -> NDArray[np.int32]:
        home = np.full(len(chosen), self._table.rank, np.int32)
        ranks = choose_ranks(chosen, home, self._table.holds[self._layer], self._table.node_of_rank)
        self._table.traffic.count_sent(ranks, self._table.rank, self._table.node_of_rank)
        return ranks
