"""Make a placement from a trace: sample, homes, every layer down the tree, homes again, labels, and held-out scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.baselines import eplb_placement, linear_placement, rows_of_ranks
from placement.core import Placement
from placement.descend import Branch, Settings, check_groups, place_layer, tree_of
from placement.effort import Wish, sampled_tokens, settings_for, size_factor
from placement.errors import TraceError
from placement.evaluate import replay, score_of
from placement.graph import count_load
from placement.homes import (
    cluster_requests,
    homes_of,
    homes_per_token,
    random_homes,
    route_homes,
    telling_layers,
)
from placement.matching import match_labels
from placement.planfile import Plan
from placement.refine import Sample
from placement.shares import level_shares
from placement.topology import Topology
from placement.trace import RoutingTrace
from placement.trust import Ratio, compare

HOME_PREFIX = 64


def plan_placement(
    trace: RoutingTrace,
    topology: Topology,
    *,
    rows_per_rank: int | Sequence[int],
    current: Placement | None = None,
    seed: int = 0,
    effort: float = 1.0,
    balance_price: float = 1.0,
    balance_only: bool = False,
    keep_groups: int = 0,
) -> Placement:
    """A placement for the trace's traffic: few other nodes and ranks visited, level load.

    rows_per_rank: slots of a layer on each rank, one number or one a rank; ranks with fewer keep empty rows at the end.
    With a current placement of the same shape, names of nodes and ranks are matched to it and experts that stay keep
    their rows; the epoch follows on. effort, balance_price, balance_only: see `Wish`. keep_groups: that many expert
    groups of equal size (grouped routing) each lie whole on one node, and are copied to other nodes as a whole.

    Raises PlacementError where the slots cannot hold the experts or the groups, TraceError where the current placement
    is of another model.
    """
    rows = rows_of_ranks(rows_per_rank, topology, trace.num_experts)
    check_groups(keep_groups, rows, topology, trace.num_experts)
    _check_current(current, trace)
    wish = Wish(
        rows_of_rank=rows,
        effort=effort,
        balance_price=balance_price,
        balance_only=balance_only,
        num_groups=keep_groups,
    )
    tree = tree_of(topology)
    routed = _first_homes(trace, tree, topology, seed)
    routable = topology.num_nodes > 1 and trace.num_requests > 1 and not balance_only
    # A first draft is made to draw homes from alone, which a part of a large model's layers is enough for.
    step = telling_layers(trace).step if routable else 1
    seen = replace(trace, experts=np.ascontiguousarray(trace.experts[:, ::step]), gate_weight=None, layers=None)
    sampled = sampled_tokens(trace)
    table = _place(seen, tree, settings_for(trace, topology, wish, draft=routable), routed, sampled, seed)
    draft = _first_epoch(table, topology, trace)
    if routable:
        requests, ranks = route_homes(draft, topology, seen, max(16, int(HOME_PREFIX * size_factor(trace))))
        routed = homes_per_token(trace.request, requests, ranks)
        table = _place(trace, tree, settings_for(trace, topology, wish, draft=False), routed, sampled, seed + 1)
        draft = _first_epoch(table, topology, trace)
    placed = draft if current is None else match_labels(draft, current, topology, rows)
    return level_shares(placed, topology, trace, _both_homes(routed, topology, seed), sampled_tokens=sampled)


def _first_epoch(table: NDArray[np.int32], topology: Topology, trace: RoutingTrace) -> Placement:
    return Placement(epoch=0, num_ranks=topology.num_ranks, num_experts=trace.num_experts, physical_to_logical=table)


def _both_homes(routed: NDArray[np.int32], topology: Topology, seed: int) -> NDArray[np.int32]:
    """Half of the tokens at home as routed, half at random: [T]."""
    rng = np.random.default_rng(seed)
    anywhere = rng.integers(0, topology.num_ranks, len(routed)).astype(np.int32)
    return np.where(rng.random(len(routed)) < 0.5, routed, anywhere)


def _check_current(current: Placement | None, trace: RoutingTrace) -> None:
    if current is not None and (current.num_layers, current.num_experts) != (trace.num_layers, trace.num_experts):
        raise TraceError(
            f"the trace is of another model: it has {trace.num_layers} layers x {trace.num_experts} experts, "
            f"the current placement {current.num_layers} x {current.num_experts}"
        )


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
    trace: RoutingTrace, tree: Branch, settings: Settings, routed: NDArray[np.int32], sampled: int, seed: int
) -> NDArray[np.int32]:
    """The table [L, P]. Half of the sample has random homes, half routed ones, so that the plan serves both."""
    rng = np.random.default_rng(seed)
    picks = [rng.permutation(trace.num_tokens)[:sampled] for _ in range(2)]
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
    rows_per_rank: int | Sequence[int],
    current: Placement | None = None,
    seed: int = 0,
    effort: float = 1.0,
    balance_price: float = 1.0,
    keep_groups: int = 0,
) -> Plan:
    """Fit on one part of the requests, score on the other: the plan and what it is expected to do.

    measured: `fit` and `held_out` (tokens, requests), the scores `before` (the current placement, linear unless given),
    `after`, `eplb`, all with random homes (or the recorded ones), and `after_routed_homes`; `trust`: nodes visited
    after over before, and over EPLB, with a 95% interval over requests; `says`: one sentence.

    Where ranks have unlike numbers of slots, EPLB and linear get as many on each as the mean, rounded down (up where
    that would not hold the experts). Raises as `plan_placement`, and TraceError where the trace has one request only.
    """
    fit, held_out = trace.split_by_request()
    placement = plan_placement(
        fit,
        topology,
        rows_per_rank=rows_per_rank,
        current=current,
        seed=seed,
        effort=effort,
        balance_price=balance_price,
        keep_groups=keep_groups,
    )
    even_rows = max(int(np.mean(rows_per_rank)), -(-trace.num_experts // topology.num_ranks))
    return judged(placement, topology, fit, held_out, before=current, even_rows=even_rows, seed=seed)


def judged(
    placement: Placement,
    topology: Topology,
    fit: RoutingTrace,
    held_out: RoutingTrace,
    *,
    before: Placement | None,
    even_rows: int,
    seed: int,
) -> Plan:
    """A placement with its scores on requests that it was not fitted on, as `make_plan` tells them.

    before: the current placement; linear where there is none for these ranks. even_rows: rows of linear and of EPLB.
    """
    if before is None or before.num_ranks != topology.num_ranks:
        before = linear_placement(fit.num_layers, fit.num_experts, topology.num_ranks, even_rows)
    eplb = eplb_placement(count_load(fit)[0], topology.num_ranks, even_rows)
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
