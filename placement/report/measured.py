"""What a plan's `measured` says, read with care: it is free-form JSON from a file that anyone may have edited.

What is well-formed is read, what is missing or null is not known, and a known key with a wrong value is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placement.errors import PlacementError

LABELS = {"before": "before", "eplb": "EPLB", "after": "plan", "after_routed_homes": "plan, routed homes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The tokens and requests that a figure stands on."""

    tokens: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Nodes visited by one placement over another's, with the ends of its 95% interval over requests."""

    ratio: float
    low: float
    high: float
    requests: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """scores: figures by name, by placement (a key of LABELS). trust: intervals, by 'after_over_before' and so on."""

    fit: Evidence | None
    held_out: Evidence | None
    scores: dict[str, dict[str, float]]
    trust: dict[str, Interval]
    says: str | None


_LARGEST = 1e18
_Number = Annotated[float, Field(ge=0, le=_LARGEST, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=int(_LARGEST))]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _EvidenceModel(_Model):
    tokens: _Count | None = None
    requests: _Count | None = None

    def evidence(self) -> Evidence | None:
        if self.tokens is None or self.requests is None:
            return None
        return Evidence(tokens=self.tokens, requests=self.requests)


class _IntervalModel(_Model):
    ratio: _Number | None = None
    low: _Number | None = None
    high: _Number | None = None
    num_requests: _Count | None = None

    def interval(self) -> Interval | None:
        if self.ratio is None or self.low is None or self.high is None:
            return None
        return Interval(ratio=self.ratio, low=self.low, high=self.high, requests=self.num_requests)


class _ScoreModel(_Model):
    model_config = ConfigDict(extra="allow", strict=True)

    nodes_visited: _Number | None = None
    ranks_visited: _Number | None = None
    load_max_over_mean: _Number | None = None
    node_load_max_over_mean: _Number | None = None
    step_load_max_over_mean: _Number | None = None

    def figures(self) -> dict[str, float]:
        """The known figures, then whatever else is a number, here or one mapping down (such as a p99)."""
        found: dict[str, float] = {}
        for name, value in self.model_dump().items():
            inside = value if isinstance(value, dict) else {"": value}
            found |= {f"{name} {key}".strip(): number for key, number in inside.items() if _is_number(number)}
        return found


class _MeasuredModel(_Model):
    fit: _EvidenceModel | None = None
    held_out: _EvidenceModel | None = None
    trust: dict[str, _IntervalModel | None] | None = None
    says: str | None = None
    before: _ScoreModel | None = None
    eplb: _ScoreModel | None = None
    after: _ScoreModel | None = None
    after_routed_homes: _ScoreModel | None = None


class _PlanModel(_Model):
    measured: _MeasuredModel


def read_measured(measured: dict[str, Any]) -> Measured:
    """Raises PlacementError that names the key of the first value that cannot be what it should be."""
    try:
        model = _PlanModel.model_validate({"measured": measured}).measured
    except ValidationError as error:
        raise PlacementError(f"the plan: {_first_problem(error)}") from error
    scores = {name: getattr(model, name) for name in LABELS}
    trust = {name: ratio.interval() for name, ratio in (model.trust or {}).items() if ratio is not None}
    return Measured(
        fit=None if model.fit is None else model.fit.evidence(),
        held_out=None if model.held_out is None else model.held_out.evidence(),
        scores={name: score.figures() for name, score in scores.items() if score is not None and score.figures()},
        trust={name: interval for name, interval in trust.items() if interval is not None},
        says=model.says,
    )


def _first_problem(error: ValidationError) -> str:
    """Without the names of the models above, which no user knows."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    what = "Input should be a mapping" if problem["type"] == "model_type" else problem["msg"]
    return f"key '{key}': {what} (got {str(problem['input'])[:80]!r})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
