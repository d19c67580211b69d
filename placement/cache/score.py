"""Every policy beside Belady's optimum on the same lookups: fitted on the even requests, judged on the odd ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.cache.arenas import equal_shares, shares_by_need
from placement.cache.policy import EvictionPolicy, PolicyName
from placement.cache.simulate import belady_hits, simulate
from placement.cache.stream import LookupStream, make_stream
from placement.trace import RoutingTrace

FIT_TOKENS = 40_000
JUDGED_TOKENS = 20_000
BY_LAYER, BY_NEED = "lru, arena a layer", "lru, arenas by need"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScore:
    """One size of cache at one batch. share: slots over all experts; belady and policies: hit rates of lookups."""

    batch: int
    share: float
    num_slots: int
    num_lookups: int
    belady: float
    policies: dict[str, float]

    def of_belady(self, name: str) -> float:
        return self.policies[name] / self.belady if self.belady else 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"of_belady": {name: self.of_belady(name) for name in self.policies}}


def score_policies(trace: RoutingTrace, *, shares: list[float], batches: list[int]) -> Iterator[CacheScore]:
    """Score each policy at each batch and share, one after the other.

    At most 40,000 tokens to fit on and 20,000 to judge on. All policies see the fit part first, so that none is judged
    while it warms up. The slots themselves are empty at the start, for Belady too.
    """
    fit_trace, judged_trace = trace.split_by_request()
    num_experts = trace.num_layers * trace.num_experts
    for batch in batches:
        fit = make_stream(fit_trace, batch=batch, max_steps=max(1, FIT_TOKENS // batch))
        judged = make_stream(judged_trace, batch=batch, max_steps=max(1, JUDGED_TOKENS // batch))
        learned = {name: _learn(name, fit, trace.top_k) for name in PolicyName}
        for share in shares:
            num_slots = max(1, round(share * num_experts))
            yield CacheScore(
                batch=batch,
                share=share,
                num_slots=num_slots,
                num_lookups=judged.num_lookups,
                belady=belady_hits(judged, num_slots) / judged.num_lookups,
                policies=_hit_rates(fit, judged, learned, num_slots),
            )


def _learn(name: PolicyName, fit: LookupStream, top_k: int) -> EvictionPolicy:
    policy = EvictionPolicy(name, num_layers=fit.num_layers, num_experts=fit.num_experts, top_k=top_k, share=0.0)
    one_slot = np.ones(1, np.int64)
    simulate(fit, policy, np.zeros(fit.num_layers, np.int64), one_slot)
    return policy


def _hit_rates(
    fit: LookupStream, judged: LookupStream, learned: dict[PolicyName, EvictionPolicy], num_slots: int
) -> dict[str, float]:
    num_layers = judged.num_layers
    one_arena = np.zeros(num_layers, np.int64)

    def rate(name: PolicyName, arena_of: NDArray[np.int64], sizes: NDArray[np.int64]) -> float:
        policy = copy.deepcopy(learned[name])
        policy.resize(num_slots / (num_layers * judged.num_experts))
        return simulate(judged, policy, arena_of, sizes) / judged.num_lookups

    rates = {str(name): rate(name, one_arena, np.array([num_slots])) for name in PolicyName}
    if num_slots >= num_layers:
        own = np.arange(num_layers)
        rates[BY_LAYER] = rate(PolicyName.LRU, own, equal_shares(num_layers, num_slots))
        rates[BY_NEED] = rate(PolicyName.LRU, own, shares_by_need(fit, num_slots))
    return rates
