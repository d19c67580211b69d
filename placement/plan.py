"""Make a placement from a trace: sample, homes, every layer down the tree, homes again, labels, and held-out scores."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.baselines import check_capacity, eplb_placement, linear_placement
from placement.core import Placement
from placement.descend import Branch, Settings, place_layer, tree_of
from placement.errors import TraceError
from placement.evaluate import replay, score_of
from placement.graph import count_load
from placement.homes import (
    cluster_requests,
    homes_of,
    homes_per_token,
    random_homes,
    route_homes,
)
from placement.matching import match_labels
from placement.planfile import Plan
from placement.refine import Costs, Sample, Stage
from placement.topology import Topology
from placement.trace import RoutingTrace
from placement.trust import Ratio, compare

MOST_SAMPLED, LEAST_SAMPLED = 40_000, 5_000
SERVICES, PROPOSAL_OVERHEAD = 1e9, 100
SMALL_MODEL = 768
HOME_PREFIX = 64
BETWEEN = Costs(visit=1.0, balance=0.5)
INSIDE = Costs(visit=0.03, balance=0.75)


def plan_placement(
    trace: RoutingTrace,
    topology: Topology,
    *,
    rows_per_rank: int,
    current: Placement | None = None,
    seed: int = 0,
    effort: float = 1.0,
    balance_only: bool = False,
) -> Placement:
    """A placement for the trace's traffic: few other nodes and ranks visited, level load.

    With a current placement of the same shape, names of nodes and ranks are matched to it and experts that stay keep
    their rows; the epoch follows on. effort scales the search; balance_only forgets about hops.

    Raises PlacementError where the slots cannot hold the experts, TraceError where the current placement is of another
    model.
    """
    check_capacity(trace.num_experts, topology.num_ranks, rows_per_rank)
    _check_current(current, trace)
    tree = tree_of(topology)
    routed = _first_homes(trace, tree, topology, seed)
    routable = topology.num_nodes > 1 and trace.num_requests > 1 and not balance_only
    settings = _settings(trace, topology, rows_per_rank, effort, draft=routable, balance_only=balance_only)
    table = _place(trace, tree, settings, routed, seed)
    draft = Placement(epoch=0, num_ranks=topology.num_ranks, num_experts=trace.num_experts, physical_to_logical=table)
    if routable:
        requests, ranks = route_homes(draft, topology, trace, max(16, int(HOME_PREFIX * _size_factor(trace))))
        routed = homes_per_token(trace.request, requests, ranks)
        settings = _settings(trace, topology, rows_per_rank, effort, draft=False, balance_only=balance_only)
        table = _place(trace, tree, settings, routed, seed + 1)
        draft = replace(draft, physical_to_logical=table)
    if current is None:
        return draft
    return match_labels(draft, current, topology)


def _check_current(current: Placement | None, trace: RoutingTrace) -> None:
    if current is not None and (current.num_layers, current.num_experts) != (trace.num_layers, trace.num_experts):
        raise TraceError(
            f"the trace is of another model: it has {trace.num_layers} layers x {trace.num_experts} experts, "
            f"the current placement {current.num_layers} x {current.num_experts}"
        )


def _size_factor(trace: RoutingTrace) -> float:
    """1 up to 768 experts in all layers, then falling, so that a plan of a large model stays a matter of seconds."""
    return min(1.0, SMALL_MODEL / (trace.num_layers * trace.num_experts))


def _sampled_tokens(trace: RoutingTrace) -> int:
    """Tokens of each group (random homes, routed homes) that a plan looks at."""
    return max(LEAST_SAMPLED, int(MOST_SAMPLED * _size_factor(trace)))


def _settings(
    trace: RoutingTrace, topology: Topology, rows_per_rank: int, effort: float, *, draft: bool, balance_only: bool
) -> Settings:
    """Search stages that fit the effort. A draft is made to draw homes from: it takes one short stage alone.

    Visits grow with top_k and shrink with spare slots, balance does not: the price of imbalance goes with them.
    """
    slots, sampled = topology.num_ranks * rows_per_rank, _sampled_tokens(trace)
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
    scale = min(1.0, effort * SERVICES * _size_factor(trace) / work) * (0.2 if draft else 1.0)
    shorter = [
        tuple(replace(stage, proposals=int(stage.proposals * scale)) for stage in stages)
        for stages in (between, inside)
    ]
    price = trace.top_k * trace.num_experts / slots
    return Settings(
        rows_per_rank=rows_per_rank,
        num_experts=trace.num_experts,
        between=_priced(BETWEEN, price, balance_only),
        inside=_priced(INSIDE, price, balance_only),
        between_stages=shorter[0][: 1 if draft else 3],
        inside_stages=() if draft else shorter[1],
    )


def _priced(costs: Costs, price: float, balance_only: bool) -> Costs:
    return replace(costs, visit=0.0 if balance_only else costs.visit, balance=costs.balance * price)


def _first_homes(trace: RoutingTrace, tree: Branch, topology: Topology, seed: int) -> NDArray[np.int32]:
    """A home rank for each token from what its request uses, before there is a placement."""
    if topology.num_nodes == 1:
        return random_homes(trace.request, topology.num_ranks, seed)
    node_of_rank = topology.node_of_rank()
    cluster = cluster_requests(trace, np.bincount(node_of_rank) / topology.num_ranks, seed)
    requests, owner = np.unique(trace.request, return_inverse=True)
    spread = random_homes(requests, 1 << 20, seed)
    first = np.searchsorted(node_of_rank, np.arange(topology.num_nodes + 1))
    width = np.diff(first)
    ranks = first[cluster] + spread % width[cluster]
    return ranks[owner].astype(np.int32)


def _place(
    trace: RoutingTrace, tree: Branch, settings: Settings, routed: NDArray[np.int32], seed: int
) -> NDArray[np.int32]:
    """The table [L, P]. Half of the sample has random homes, half routed ones, so that the plan serves both."""
    rng = np.random.default_rng(seed)
    picks = [rng.permutation(trace.num_tokens)[: _sampled_tokens(trace)] for _ in range(2)]
    pick = np.concatenate(picks)
    mingle = rng.permutation(len(pick))
    home = np.concatenate([rng.integers(0, len(tree.ranks), len(picks[0])), routed[picks[1]]])[mingle]
    group = np.repeat(np.arange(2, dtype=np.uint8), [len(picks[0]), len(picks[1])])[mingle]
    chosen = trace.experts[pick[mingle]].astype(np.int16)

    def layer_rows(layer: int) -> NDArray[np.int32]:
        own = Sample(chosen=np.ascontiguousarray(chosen[:, layer]), home=home.astype(np.int16), group=group)
        return place_layer(tree, own, settings, seed * 1000 + layer).reshape(-1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.stack(list(pool.map(layer_rows, range(trace.num_layers))))


def make_plan(
    trace: RoutingTrace,
    topology: Topology,
    *,
    rows_per_rank: int,
    current: Placement | None = None,
    seed: int = 0,
    effort: float = 1.0,
) -> Plan:
    """Fit on one part of the requests, score on the other: the plan and what it is expected to do.

    measured: `fit` and `held_out` (tokens, requests), the scores `before` (the current placement, linear unless given),
    `after`, `eplb`, all with random homes (or the recorded ones), and `after_routed_homes`; `trust`: nodes visited
    after over before, and over EPLB, with a 95% interval over requests; `says`: one sentence.

    Raises as `plan_placement`, and TraceError where the trace has one request only.
    """
    fit, held_out = trace.split_by_request()
    placement = plan_placement(fit, topology, rows_per_rank=rows_per_rank, current=current, seed=seed, effort=effort)
    linear = linear_placement(trace.num_layers, trace.num_experts, topology.num_ranks, rows_per_rank)
    before = current if current is not None and current.num_ranks == topology.num_ranks else linear
    eplb = eplb_placement(count_load(fit)[0], topology.num_ranks, rows_per_rank)
    homes = homes_of(held_out, topology.num_ranks, seed)
    requests, ranks = route_homes(placement, topology, held_out, HOME_PREFIX)
    routed = homes_per_token(held_out.request, requests, ranks)
    counts = {
        "before": replay(before, topology, held_out, homes),
        "after": replay(placement, topology, held_out, homes),
        "eplb": replay(eplb, topology, held_out, homes),
        "after_routed_homes": replay(placement, topology, held_out, routed),
    }
    trust = {
        f"{name}_over_{base}": compare(counts[base].nodes, counts[name].nodes, held_out.request, seed)
        for name, base in (("after", "before"), ("after", "eplb"), ("after_routed_homes", "before"))
    }
    measured: dict[str, Any] = {
        "fit": {"tokens": fit.num_tokens, "requests": fit.num_requests},
        "held_out": {"tokens": held_out.num_tokens, "requests": held_out.num_requests},
        "trust": {name: ratio.to_dict() for name, ratio in trust.items()},
        "says": _says(trust["after_over_before"]),
    }
    measured |= {name: score_of(count, topology, held_out).to_dict() for name, count in counts.items()}
    return Plan(placement=placement, topology=topology, measured=measured)


def _says(gain: Ratio) -> str:
    behind = f"{gain.num_requests} held-out requests, {gain.num_tokens} tokens"
    if gain.holds:
        return (
            f"{1 - gain.ratio:.0%} fewer other nodes visited than before, "
            f"95% interval {1 - gain.high:.0%} to {1 - gain.low:.0%} ({behind})"
        )
    return (
        f"no gain in nodes visited that these requests can show: {gain.low:.2f} to {gain.high:.2f} of before ({behind})"
    )
