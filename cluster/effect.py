"""What a plan did, beside what it promised: traffic after the switch, replayed under it and under the one before."""

from __future__ import annotations

from typing import Any

from placement.core import Placement
from placement.evaluate import replay, score_of
from placement.homes import homes_of
from placement.planfile import Plan
from placement.topology import Topology
from placement.trace import RoutingTrace
from placement.trust import compare


def measure_effect(plan: Plan, before: Placement | None, trace: RoutingTrace) -> dict[str, Any]:
    """Scores of the plan and of the placement before it, on one and the same traffic, with the homes that it had.

    `after`, `before` (None where it was for other ranks), `after_over_before` as in `trust.Ratio`, `promised`: the same
    ratio as the planner found it on held-out requests. Raises TraceError or TopologyError where they don't fit.
    """
    topology: Topology = plan.topology
    homes = homes_of(trace, topology.num_ranks)
    after = replay(plan.placement, topology, trace, homes)
    effect: dict[str, Any] = {
        "after": score_of(after, topology, trace).to_dict(),
        "before": None,
        "after_over_before": None,
        "promised": plan.measured.get("trust", {}).get("after_over_before"),
    }
    if before is not None and before.num_ranks == topology.num_ranks:
        old = replay(before, topology, trace, homes)
        effect["before"] = score_of(old, topology, trace).to_dict()
        effect["after_over_before"] = compare(old.nodes, after.nodes, trace.request).to_dict()
    return effect
