"""The plan file: a placement, the topology that it was made for, and what was measured when it was made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from placement.core import Placement
from placement.errors import PlacementError, TopologyError
from placement.topology import Topology, first_problem, topology_from_dict

PLAN_FORMAT = "moetis-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """measured: what the planner found on held-out traffic (free-form, JSON)."""

    placement: Placement
    topology: Topology
    measured: dict[str, Any]

    def __post_init__(self) -> None:
        if self.placement.num_ranks != self.topology.num_ranks:
            raise PlacementError(
                f"the placement has {self.placement.num_ranks} ranks, but topology '{self.topology.name}' has "
                f"{self.topology.num_ranks}"
            )


class _PlanModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    epoch: int = Field(ge=0, lt=2**63)
    num_ranks: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    topology: dict[str, Any]
    physical_to_logical: list[list[int]]
    tiers: list[list[int]]
    rank_weights: list[list[int]]
    measured: dict[str, Any]


def plan_to_json(plan: Plan) -> str:
    model = _PlanModel(
        format=PLAN_FORMAT,
        epoch=plan.placement.epoch,
        num_ranks=plan.placement.num_ranks,
        num_experts=plan.placement.num_experts,
        topology=plan.topology.to_dict(),
        physical_to_logical=plan.placement.physical_to_logical.tolist(),
        tiers=plan.placement.tiers.tolist(),
        rank_weights=plan.placement.rank_weights.tolist(),
        measured=plan.measured,
    )
    return model.model_dump_json()


def plan_from_json(text: str, *, source: str) -> Plan:
    """Read a plan. source names the file for errors. Raises PlacementError."""
    try:
        raw = from_json(text)
        if isinstance(raw, dict) and raw.get("format") != PLAN_FORMAT:
            raise PlacementError(f"{source}: key 'format' must be '{PLAN_FORMAT}', got {raw.get('format')!r}")
        model = _PlanModel.model_validate(raw)
        widths = {len(row) for row in model.physical_to_logical} | {len(row) for row in model.tiers}
        if len(widths) != 1 or len(model.tiers) != len(model.physical_to_logical):
            raise PlacementError(f"{source}: 'physical_to_logical' and 'tiers' must be tables of one shape")
        placement = Placement(
            epoch=model.epoch,
            num_ranks=model.num_ranks,
            num_experts=model.num_experts,
            physical_to_logical=_table(model.physical_to_logical, np.int32),
            tiers=_table(model.tiers, np.uint8),
            rank_weights=_weights(model.rank_weights),
        )
        return Plan(
            placement=placement,
            topology=topology_from_dict(model.topology, source=f"{source}: key 'topology'"),
            measured=model.measured,
        )
    except ValidationError as error:
        raise PlacementError(f"{source}: {first_problem(error)}") from error
    except PlacementError as error:
        raise PlacementError(str(error) if str(error).startswith(source) else f"{source}: {error}") from error
    except TopologyError:
        raise
    except ValueError as error:
        raise PlacementError(f"{source}: not JSON: {error}") from error


def _weights(rows: list[list[int]]) -> Any:
    if not rows or len({len(row) for row in rows}) != 1:
        raise PlacementError("'rank_weights' must be a table of one row a layer and one number a rank")
    return _table(rows, np.uint16)


def _table(rows: list[list[int]], dtype: type[np.integer[Any]]) -> Any:
    try:
        return np.array(rows, dtype)
    except OverflowError as error:
        raise PlacementError(f"a value does not fit: {error}") from error


def load_plan(path: str | Path) -> Plan:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"plan '{path}': cannot be read: {error}") from error
    return plan_from_json(text, source=f"plan '{path}'")
