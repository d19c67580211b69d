"""Whether it is time to plan again: the traffic since the last decision against the traffic that it was made on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.traffic import Mark, Traffic
from placement.drift import Drift, measure_drift
from placement.errors import TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftCheck:
    """due: whether to plan again. drift is None where the two could not be compared; says tells why, or how far."""

    due: bool
    says: str
    drift: Drift | None

    def to_dict(self) -> dict[str, Any]:
        return {"due": self.due, "says": self.says, "drift": None if self.drift is None else self.drift.to_dict()}


def check_drift(traffic: Traffic, mark: Mark | None, seed: int) -> DriftCheck:
    """mark: where the trace ended at the last decision, None before the first: then any traffic is reason enough."""
    reference = traffic.reference()
    if mark is None or reference is None:
        try:
            recorded = traffic.recent()
        except TraceError as error:
            return DriftCheck(due=False, says=f"nothing to go by yet: {error}", drift=None)
        due = recorded.num_requests >= 2
        return DriftCheck(due=due, says=f"no decision yet, {recorded.num_requests} requests recorded", drift=None)
    try:
        present = traffic.recent(mark)
        if (present.num_layers, present.num_experts) != (reference.num_layers, reference.num_experts):
            return DriftCheck(due=True, says="the last decision was made for another model", drift=None)
        drift = measure_drift(reference, present, seed=seed)
    except TraceError as error:
        return DriftCheck(due=False, says=f"too little traffic since the last decision: {error}", drift=None)
    return DriftCheck(due=drift.drifted, says=drift.says(), drift=drift)
