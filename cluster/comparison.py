"""What `moetis evaluate` does: one plan beside any number of other placements, on the same held-out traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.offline import HELD_OUT, baseline_placement, homes_for
from placement.comparing import Assessment, Serving, assess
from placement.core import Placement
from placement.evaluate import check_fit
from placement.graph import count_load
from placement.planfile import Plan, load_plan
from placement.trace import RoutingTrace

PLAN, PRESENT = "plan", "present"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Placements by name, the plan first, on the same requests and homes. judged_on, homes, sizes: in words."""

    judged_on: str
    homes: str
    sizes: str
    serving: Serving
    assessed: dict[str, Assessment]

    def to_dict(self) -> dict[str, Any]:
        plan, *others = self.assessed
        return {
            "judged_on": self.judged_on,
            "homes": self.homes,
            "sizes": self.sizes,
            "gpu_share": self.serving.gpu_share,
            "overlap": self.serving.overlap,
            "plan": self.assessed[plan].to_dict(),
            "baselines": {name: self.assessed[name].to_dict() for name in others},
            "plan_over_baseline": {name: self.assessed[plan].over(self.assessed[name]) for name in others},
        }


def other_plans(present: str | None, files: Sequence[str]) -> dict[str, Placement]:
    """The placements of plan files by name: the one in force is 'present', others go by their file's stem, made
    different with a number where it must. Raises as `load_plan`."""
    found: dict[str, Placement] = {}
    if present is not None:
        found[PRESENT] = load_plan(present).placement
    for file in files:
        name = next(name for name in _names(Path(file).stem) if name not in found and name != PLAN)
        found[name] = load_plan(file).placement
    return found


def _names(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def compare(
    plan: Plan,
    trace: RoutingTrace,
    *,
    others: dict[str, Placement],
    baselines: Sequence[str],
    on: str,
    homes: str,
    serving: Serving,
    sizes: str,
) -> Comparison:
    """Assess a plan, other placements and the named baselines on the held-out (odd) requests, or on all.

    Baselines are fitted on the other requests (with on='all', on the same ones) and have the plan's number of slots.
    homes: 'recorded' (random where the trace does not know them), 'random', or a file from `moetis homes`.
    Raises as `check_fit` for each placement.
    """
    for placement in (plan.placement, *others.values()):
        check_fit(placement, plan.topology, trace)
    fit, judged = trace.split_by_request() if on == HELD_OUT else (trace, trace)
    home = homes_for(homes, trace, judged, plan.topology.num_ranks, serving.seed)
    load = count_load(fit)[0]
    fitted = {name: baseline_placement(name, load, plan.placement, serving.seed) for name in baselines}
    placements = {PLAN: plan.placement} | others | fitted
    return Comparison(
        judged_on=f"{judged.num_tokens} tokens of {judged.num_requests} {on} requests",
        homes="random (the trace records none)" if homes == "recorded" and judged.source_rank.min() < 0 else homes,
        sizes=sizes,
        serving=serving,
        assessed={
            name: assess(placement, plan.topology, judged, home, serving) for name, placement in placements.items()
        },
    )
