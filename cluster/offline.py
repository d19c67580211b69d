"""What the commands that need no cluster do: files in, files and numbers out."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.baselines import eplb_placement, linear_placement, random_placement
from placement.core import Placement
from placement.counts import Counts, check_counts, score_counts
from placement.curve import CurvePoint, fewest_rows
from placement.errors import ConfigError, PlacementError, TraceError
from placement.evaluate import check_fit
from placement.files import write_whole
from placement.homes import homes_of, homes_per_token, random_homes, route_homes
from placement.layers import ModelLayers
from placement.planfile import Plan
from placement.trace import RoutingTrace

HELD_OUT, ALL = "held-out", "all"


def _ratio(mine: float, other: float) -> float | None:
    return mine / other if other else None


def output_path(text: str, option: str = "--out") -> Path:
    """Where a result is to go, checked before the work is done. Raises ConfigError."""
    path = Path(text)
    if path.is_dir():
        raise ConfigError(f"{option} '{path}': is a folder; give a file name")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} '{path}': the folder '{path.parent}' does not exist")
    return path


def write_result(path: Path, data: bytes, option: str = "--out") -> None:
    """Write a result whole. Raises ConfigError where the system refuses."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise ConfigError(f"{option} '{path}': cannot be written: {error.strerror}") from error


def refuse_with_counts(**options: object) -> None:
    """Raises ConfigError where an option that needs tokens is given (is not None) with counts alone."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name} {value}: counts alone know neither requests nor homes; leave it out")


def refuse_with_tokens(**options: object) -> None:
    """Raises ConfigError where an option that is for counts alone is given with a trace of tokens."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name} {value}: a trace has its own requests to fit on; it is for counts alone")


def compare_counts(
    plan: Plan, counts: Counts, *, names: list[str], seed: int, fit: RoutingTrace | Counts | None = None
) -> dict[str, Any]:
    """Load max/mean of a plan and of the named baselines, which are fitted on fit, or on these very counts."""
    mine = score_counts(plan.placement, plan.topology, counts)
    source = counts if fit is None else fit
    if not isinstance(source, Counts):
        raise ConfigError("--fit: holds tokens; give counts, such as those of the workload that the plan was made for")
    check_counts(plan.placement, plan.topology, source)
    fitted = {name: baseline_placement(name, source.load, plan.placement, seed) for name in names}
    scores = {name: score_counts(placement, plan.topology, counts) for name, placement in fitted.items()}
    ratio = {
        name: {figure: _ratio(mine[figure], value) for figure, value in score.items()} for name, score in scores.items()
    }
    return {
        "judged_on": counts.source,
        "fitted_on": source.source,
        "plan": mine,
        "baselines": scores,
        "plan_over_baseline": ratio,
    }


def share_of(text: str, option: str) -> float:
    """A share from '30%' or '0.3'. Raises ConfigError where it is none, or not between 0 and 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise ConfigError(f"{option} '{text}': write a share above 0% and below 100%, such as 30%")
    return share


def slots_result(curve: list[CurvePoint], num_experts: int, goal: float | None) -> dict[str, Any]:
    """The curve, and where there is a goal the first point that reaches it (None where none does)."""
    points = [point.to_dict() | {"times_experts": point.num_slots / num_experts} for point in curve]
    if goal is None:
        return {"curve": points}
    rows = fewest_rows(curve, goal)
    fewest = next((point for point in points if point["rows_per_rank"] == rows), None)
    return {"curve": points, "goal": goal, "fewest": fewest}


def baseline_placement(name: str, load: NDArray[Any], like: Placement, seed: int) -> Placement:
    """A named baseline with as many slots as another placement, fitted on load [L, E]."""
    shape = (like.num_ranks, like.rows_per_rank)
    if name == "eplb":
        return eplb_placement(load, *shape)
    if name == "linear":
        return linear_placement(like.num_layers, like.num_experts, *shape)
    return random_placement(like.num_layers, like.num_experts, *shape, seed)


def homes_for(homes: str, trace: RoutingTrace, judged: RoutingTrace, num_ranks: int, seed: int) -> NDArray[np.int32]:
    """The home [T] of each judged token: 'recorded' (random where unknown), 'random', or a file from `moetis homes`."""
    if homes == "random":
        return random_homes(judged.request, num_ranks, seed)
    if homes == "recorded":
        return homes_of(judged, num_ranks, seed)
    ranks = _load_homes(Path(homes), num_ranks)
    requests = np.unique(trace.request)
    if len(requests) != len(ranks):
        raise TraceError(f"homes '{homes}': has {len(ranks)} requests, the trace has {len(requests)}")
    return homes_per_token(judged.request, requests, ranks)


def _load_homes(path: Path, num_ranks: int) -> NDArray[np.int32]:
    try:
        ranks = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TraceError(
            f"homes '{path}': not a readable .npy (and neither 'recorded' nor 'random'): {error}"
        ) from error
    if not isinstance(ranks, np.ndarray) or ranks.ndim != 1 or ranks.dtype.kind not in "ui":
        raise TraceError(f"homes '{path}': must be one row of integers, as `moetis homes` writes it")
    if len(ranks) and not 0 <= ranks.min() <= ranks.max() < num_ranks:
        raise TraceError(f"homes '{path}': ranks go from 0 to {num_ranks - 1}, found {ranks.min()} to {ranks.max()}")
    return ranks.astype(np.int32)


def homes_file(plan: Plan, trace: RoutingTrace, prefix: int) -> tuple[NDArray[np.int64], NDArray[np.int32], bytes]:
    """Homes from each request's first prefix tokens: requests [Q] ascending, ranks [Q], the .npy's bytes."""
    check_fit(plan.placement, plan.topology, trace)
    requests, ranks = route_homes(plan.placement, plan.topology, trace, prefix)
    buffer = io.BytesIO()
    np.save(buffer, ranks.astype(np.int32))
    return requests, ranks, buffer.getvalue()


def with_layers(plan: Plan, layers: ModelLayers | None) -> Plan:
    """The plan, with which hidden layers of the model its layers are, where that is known."""
    return plan if layers is None else replace(plan, measured=plan.measured | {"layers": layers.to_dict()})


def rows_of(text: str) -> int | list[int]:
    """Slots per rank from '9' or '9,9,6,6'. Raises ConfigError where it is neither."""
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1:
        raise ConfigError(f"--slots-per-rank '{text}': write a number from 1 up, or one for each rank, such as 9,9,6,6")
    return rows[0] if len(rows) == 1 else rows


def for_counts(rows: int | list[int], *, keep_groups: int, model: str | None) -> int:
    """The slots per rank of a plan from counts alone. Raises ConfigError for what only a trace can give."""
    if isinstance(rows, list) or keep_groups or model is not None:
        raise ConfigError(
            "counts alone know one number of slots for all ranks, no groups and no step times: "
            "leave out --keep-groups and --model, and give --slots-per-rank one number"
        )
    return rows


def check_current(current: Plan | None, rows: int | list[int], num_ranks: int) -> None:
    """Raises PlacementError where the present plan is of another size than the one asked for."""
    if current is None:
        return
    slots_per_rank = rows if isinstance(rows, int) else max(rows)
    mine, theirs = (num_ranks, slots_per_rank), (current.placement.num_ranks, current.placement.rows_per_rank)
    if mine != theirs:
        raise PlacementError(
            f"--current has {theirs[0]} ranks x {theirs[1]} slots, but {mine[0]} ranks x {mine[1]} slots are asked for"
        )
