"""How much a plan may look at and try, and what imbalance is worth against visits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.descend import Settings
from placement.refine import Costs, Stage
from placement.topology import Topology
from placement.trace import RoutingTrace

MOST_SAMPLED, LEAST_SAMPLED = 40_000, 5_000
SERVICES, PROPOSAL_OVERHEAD = 1e9, 100
SMALL_MODEL = 768
LARGE_MODEL_STEEPNESS = 1.5
BETWEEN = Costs(visit=1.0, balance=0.5)
INSIDE = Costs(visit=0.03, balance=0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a plan is asked for. rows_of_rank [R]: the slots that each rank has in a layer.

    effort scales the search. balance_price scales what load max/mean is worth against visits; balance_only forgets
    about visits. num_groups: expert groups (of grouped routing), each to lie on one node as a whole; 0 for none.
    """

    rows_of_rank: NDArray[np.int64]
    effort: float = 1.0
    balance_price: float = 1.0
    balance_only: bool = False
    num_groups: int = 0


def size_factor(trace: RoutingTrace) -> float:
    """1 up to 768 experts in all layers, then falling, so that a plan of a large model stays a matter of seconds."""
    return min(1.0, SMALL_MODEL / (trace.num_layers * trace.num_experts))


def sampled_tokens(trace: RoutingTrace) -> int:
    """Tokens of each group (random homes, routed homes) that a plan looks at."""
    return max(LEAST_SAMPLED, int(MOST_SAMPLED * size_factor(trace)))


def settings_for(trace: RoutingTrace, topology: Topology, wish: Wish, *, draft: bool) -> Settings:
    """Search stages that fit the effort. A draft is made to draw homes from: it takes one short stage alone.

    Visits grow with top_k and shrink with spare slots, balance does not: the price of imbalance goes with them. It
    falls twice with spare slots, for shares level much of what the search leaves.
    """
    slots, sampled = int(wish.rows_of_rank.sum()), sampled_tokens(trace)
    per_node = -(-slots // topology.num_nodes)
    between = (
        Stage(tokens=1000, proposals=600 * slots, hot=0.05, cold=0.005),
        Stage(tokens=4000, proposals=150 * slots, hot=0.005),
        Stage(tokens=sampled, proposals=600_000 * slots // sampled),
    )
    inside = (
        Stage(tokens=2000, proposals=100 * per_node, hot=0.01, cold=0.001),
        Stage(tokens=sampled, proposals=400_000 * per_node // sampled),
    )
    touched = 4 * trace.top_k / trace.num_experts
    work = trace.num_layers * sum(
        nodes * stage.proposals * (touched * stage.tokens / nodes + PROPOSAL_OVERHEAD)
        for nodes, stages in ((1, between), (topology.num_nodes, inside))
        for stage in stages
    )
    scale = min(1.0, wish.effort * SERVICES * size_factor(trace) ** LARGE_MODEL_STEEPNESS / work) * (
        0.2 if draft else 1.0
    )
    shorter = [
        tuple(replace(stage, proposals=int(stage.proposals * scale)) for stage in stages)
        for stages in (between, inside)
    ]
    price = wish.balance_price * trace.top_k * (trace.num_experts / slots) ** 2
    return Settings(
        rows_of_rank=wish.rows_of_rank,
        num_groups=wish.num_groups,
        num_experts=trace.num_experts,
        between=_priced(BETWEEN, price, wish.balance_only),
        inside=_priced(INSIDE, price, wish.balance_only),
        between_stages=shorter[0][: 1 if draft else 3],
        inside_stages=() if draft else shorter[1],
    )


def _priced(costs: Costs, price: float, balance_only: bool) -> Costs:
    return replace(costs, visit=0.0 if balance_only else costs.visit, balance=costs.balance * price)
