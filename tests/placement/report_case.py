"""One small report with something of everything, from arrays alone: what the texts of reports are tested on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from placement.baselines import linear_placement
from placement.core import Placement, Tier
from placement.planfile import Plan
from placement.report import LiveFigure, PastEpoch, Report, Sizes, make_report
from placement.topology import load_topology
from placement.trace import RoutingTrace

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>|`*[a](http://x) @all\"&"


def case_trace(**more: Any) -> RoutingTrace:
    """160 tokens of 8 requests, 2 layers, 8 experts, top-2: token t chooses t and t + 1, or t and t + 3, modulo 8."""
    token = np.arange(160)
    first = np.stack([token % 8, token // 2 % 8], axis=1)
    values: dict[str, Any] = {
        "num_experts": 8,
        "experts": np.stack([first, (first + np.array([1, 3])) % 8], axis=2).astype(np.uint8),
        "request": token // 20,
        "position": (token % 20).astype(np.int32),
        "step": np.zeros(160, np.int64),
        "source_rank": (token // 20 % 4).astype(np.int32),
        "phase": np.zeros(160, np.uint8),
        "workload": (token // 20 % 2).astype(np.uint8),
        "workload_names": ("code", "prose"),
        "model": "tiny",
    }
    return RoutingTrace(**values | more)


def case_placements() -> tuple[Placement, Placement]:
    before = linear_placement(2, 8, 4, 3)
    table = np.roll(before.physical_to_logical.reshape(2, 4, 3), 1, axis=1).reshape(2, 12)
    tiers = np.tile(np.array([Tier.HOT, Tier.WARM, Tier.COLD], np.uint8), (2, 4))
    return before, replace(before, epoch=4, physical_to_logical=table, tiers=tiers)


def case_measured() -> dict[str, Any]:
    def score(nodes: float, load: float) -> dict[str, float]:
        return {"nodes_visited": nodes, "ranks_visited": 2 * nodes, "load_max_over_mean": load}

    ratio = {"ratio": 0.75, "low": 0.7, "high": 0.8, "num_tokens": 800, "num_requests": 40}
    return {
        "fit": {"tokens": 900, "requests": 40},
        "held_out": {"tokens": 800, "requests": 40},
        "before": score(0.8, 1.4),
        "eplb": score(0.75, 1.1),
        "after": score(0.6, 1.15),
        "trust": {"after_over_before": ratio},
    }


def case_report(name: str = "", **more: Any) -> Report:
    """name: put wherever a name from outside may stand, in place of ordinary ones."""
    before, after = case_placements()
    topology = load_topology("2x2")
    trace = case_trace()
    live = (LiveFigure(name="cache hit rate", before=0.4, after=0.5, unit="%"),)
    past = (
        PastEpoch(epoch=2, at="2026-11-28T10:00:00.000Z", state="left", reason="too little to gain"),
        PastEpoch(
            epoch=3,
            at="2026-11-29T10:00:00.000Z",
            state="served",
            reason="",
            before=1.0,
            promised=0.75,
            most=0.77,
            found=0.8,
        ),
    )
    measured = case_measured()
    title = "Case"
    if name:
        topology = replace(topology, name=name, levels=("node", name))
        trace = case_trace(model=name, workload_names=(name, f"{name}2"))
        live = (LiveFigure(name=name, before=None, after=1.0, unit=name),)
        past = (replace(past[0], reason=name, state=name, at=name),)
        measured |= {"says": name, "after": measured["after"] | {name: 1.0}}
        measured["trust"] = measured["trust"] | {name: {"ratio": 1, "low": 1, "high": 1}}
        title = name
    plan = Plan(placement=after, topology=topology, measured=measured)
    sizes = Sizes(expert_bytes=10_000_000, token_bytes=2048)
    return make_report(
        plan, trace, **{"before": before, "live": live, "past": past, "sizes": sizes, "title": title} | more
    )
