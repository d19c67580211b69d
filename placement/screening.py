"""Is it worth it at all? An answer in under a minute from a small trace, with its reasons and its evidence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.baselines import eplb_placement, linear_placement
from placement.comparing import Assessment, PhaseCost, Serving, assess
from placement.core import Placement
from placement.graph import count_load
from placement.homes import homes_of, homes_per_token, random_homes, route_homes
from placement.intervals import Interval
from placement.plan import HOME_PREFIX, plan_placement
from placement.scaleout import sample_layers
from placement.topology import Topology
from placement.trace import RoutingTrace

MOST_LAYERS, MOST_TOKENS, EFFORT = 6, 30_000, 0.15
FEWEST_TOKENS, FEWEST_REQUESTS = 2_000, 20
SPARE_TIMES = 1.5
WORTH, LITTLE = 0.05, 0.02
YES, WITH_SPARE, NO, UNSURE = "worth it", "worth it with spare slots", "not worth it", "cannot tell yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a plan would save of a step of the MoE layers: 1 - (its time / that of EPLB with as many slots), by phase.

    interval: 95% over requests. exchange_share: of EPLB's step; between_nodes_share: what would be saved if nothing
    had to cross between nodes, the most that any placement could gain there. routed_gain: with homes chosen by the
    first tokens.
    """

    phase: str
    slots: str
    num_slots: int
    gain: float
    interval: Interval | None
    routed_gain: float
    exchange_share: float
    between_nodes_share: float
    over_linear: float

    @property
    def is_sure(self) -> bool:
        return self.interval is not None and self.interval[0] > 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_sure": self.is_sure}


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """answer: one of four; reasons: in words, the weightiest first; gains: by slots and phase."""

    answer: str
    reasons: tuple[str, ...]
    gains: tuple[Gain, ...]
    tokens: int
    requests: int
    layers_seen: int
    layers: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gains": [gain.to_dict() for gain in self.gains]}


def screen(trace: RoutingTrace, topology: Topology, serving: Serving) -> Screening:
    """Plan quickly, on a sample of tokens and layers, without and with spare slots; compare modelled steps with EPLB's.

    serving's batches are tokens of all ranks together. Raises TraceError where the trace has one request only.
    """
    sample, _ = sample_layers(trace, MOST_LAYERS)
    rng = np.random.default_rng(serving.seed)
    if sample.num_tokens > MOST_TOKENS:
        sample = sample.select(_whole_requests(sample, rng))
    fit, judged = sample.split_by_request()
    gains: list[Gain] = []
    for label, times in (("none spare", 1.0), ("half as many again", SPARE_TIMES)):
        rows = min(trace.num_experts, math.ceil(times * trace.num_experts / topology.num_ranks))
        gains += _gains(label, rows, fit, judged, topology, serving)
    return Screening(
        answer=_answer(gains, topology, trace),
        reasons=tuple(_reasons(gains, topology, trace)),
        gains=tuple(gains),
        tokens=judged.num_tokens,
        requests=judged.num_requests,
        layers_seen=sample.num_layers,
        layers=trace.num_layers,
    )


def _whole_requests(trace: RoutingTrace, rng: np.random.Generator) -> NDArray[np.intp]:
    """Tokens of requests drawn at random, about 30,000 of them."""
    requests, owner, size = np.unique(trace.request, return_inverse=True, return_counts=True)
    order = rng.permutation(len(requests))
    kept = order[: max(2, int(np.searchsorted(np.cumsum(size[order]), MOST_TOKENS)))]
    return np.flatnonzero(np.isin(owner, kept))


def _gains(
    label: str, rows: int, fit: RoutingTrace, judged: RoutingTrace, topology: Topology, serving: Serving
) -> list[Gain]:
    load = count_load(fit)[0]
    plan = plan_placement(fit, topology, rows_per_rank=rows, seed=serving.seed, effort=EFFORT)
    homes = _homes(judged, topology, serving.seed)
    requests, ranks = route_homes(plan, topology, judged, HOME_PREFIX)
    routed_homes = homes_per_token(judged.request, requests, ranks)
    linear = linear_placement(fit.num_layers, fit.num_experts, topology.num_ranks, rows)

    def assessed(placement: Placement, where: NDArray[np.int32]) -> Assessment:
        return assess(placement, topology, judged, where, serving)

    mine, routed = assessed(plan, homes), assessed(plan, routed_homes)
    eplb, plain = (assessed(one, homes) for one in (eplb_placement(load, topology.num_ranks, rows), linear))
    return [
        _gain(
            label, phase, plan.num_slots, mine.phases[phase], routed.phases[phase], eplb.phases[phase], plain, topology
        )
        for phase in mine.phases
    ]


def _homes(trace: RoutingTrace, topology: Topology, seed: int) -> NDArray[np.int32]:
    """As recorded, where they were recorded on a cluster no larger than this one; else random."""
    if trace.source_rank.max() < topology.num_ranks:
        return homes_of(trace, topology.num_ranks, seed)
    return random_homes(trace.request, topology.num_ranks, seed)


def _gain(
    label: str,
    phase: str,
    num_slots: int,
    mine: PhaseCost,
    routed: PhaseCost,
    eplb: PhaseCost,
    plain: Assessment,
    topology: Topology,
) -> Gain:
    over = mine.ratio_to(eplb)
    spread = over["interval"]
    node = topology.levels[topology.node_level]
    link = topology.links[topology.node_level]
    crossing = eplb.cost.busiest_bytes[node] / link.bandwidth
    return Gain(
        phase=phase,
        slots=label,
        num_slots=num_slots,
        gain=1 - over["ratio"],
        interval=None if spread is None else (1 - spread[1], 1 - spread[0]),
        routed_gain=1 - routed.cost.mean_s / eplb.cost.mean_s,
        exchange_share=eplb.cost.exchange_share,
        between_nodes_share=crossing / eplb.cost.mean_s,
        over_linear=1 - mine.cost.mean_s / plain.phases[phase].cost.mean_s,
    )


def _is_small(trace: RoutingTrace) -> bool:
    return trace.num_tokens < FEWEST_TOKENS or trace.num_requests < FEWEST_REQUESTS


def _answer(gains: list[Gain], topology: Topology, trace: RoutingTrace) -> str:
    without, spare = ([gain for gain in gains if (gain.slots == "none spare") == plain] for plain in (True, False))
    if topology.num_nodes == 1 and max(gain.gain for gain in gains) < WORTH:
        return NO
    if _is_small(trace):
        return UNSURE
    if any(gain.gain >= WORTH and gain.is_sure for gain in without):
        return YES
    if any(gain.gain >= WORTH and gain.is_sure for gain in spare):
        return WITH_SPARE
    doubtful = any(gain.gain >= LITTLE and not gain.is_sure for gain in gains)
    return UNSURE if doubtful else NO


def _reasons(gains: list[Gain], topology: Topology, trace: RoutingTrace) -> list[str]:
    best = max(gains, key=lambda gain: gain.gain)
    said = [_of_gain(gain) for gain in gains]
    if _is_small(trace):
        said.insert(
            0,
            f"the trace has {trace.num_tokens} tokens of {trace.num_requests} requests; {FEWEST_TOKENS} of "
            f"{FEWEST_REQUESTS} are the least to judge by: record more",
        )
    if topology.num_nodes == 1:
        said.insert(0, "there is one node only: nothing crosses between nodes, and only balance is left to gain")
    said.append(
        f"links between nodes take {best.between_nodes_share:.0%} of EPLB's {best.phase} step ({best.slots}): "
        f"the most that any placement could save there; links twice as fast would save half of it without one"
    )
    if best.routed_gain > best.gain + LITTLE:
        said.append(
            f"homes routed by a request's first {HOME_PREFIX} tokens would make it {best.routed_gain:.0%} "
            f"({best.phase}, {best.slots}): the larger part needs your gateway's help"
        )
    said.append("all of this is of the MoE layers' time; attention and the rest of a step are not made faster")
    return said


def _of_gain(gain: Gain) -> str:
    spread = "" if gain.interval is None else f" (95%: {gain.interval[0]:.1%} to {gain.interval[1]:.1%})"
    return (
        f"{gain.phase}, {gain.num_slots} slots ({gain.slots}): {gain.gain:.1%} shorter than EPLB's{spread}, "
        f"{gain.over_linear:.1%} than experts in id order; {gain.exchange_share:.0%} of EPLB's step is exchange"
    )
