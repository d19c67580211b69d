"""The fast loop as a plan: the placement stays, its shares and a few copies are drawn anew for the present load."""

from __future__ import annotations

from dataclasses import replace

from placement.core import Placement
from placement.graph import count_load
from placement.plan import judged
from placement.planfile import Plan
from placement.relevel import relevel
from placement.topology import Topology
from placement.trace import RoutingTrace


def make_levelled_plan(
    trace: RoutingTrace, topology: Topology, current: Placement, *, most_copies: int, seed: int = 0
) -> Plan:
    """Level the current placement for one half of the requests, with at most most_copies experts copied; judge on the
    other half. measured: as `make_plan`, and `says` tells of the load.

    Raises as `relevel`, and TraceError where the trace has one request only.
    """
    fit, held_out = trace.split_by_request()
    placement = relevel(current, count_load(fit)[0], most_copies=most_copies)
    plan = judged(placement, topology, fit, held_out, before=current, even_rows=current.rows_per_rank, seed=seed)
    before, after = (plan.measured[name]["load_max_over_mean"] for name in ("before", "after"))
    says = (
        f"the heaviest rank carries {after:.3f} of the mean load, {before:.3f} before "
        f"({held_out.num_requests} held-out requests, {held_out.num_tokens} tokens)"
    )
    return replace(plan, measured=plan.measured | {"says": says})
