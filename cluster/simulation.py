"""What `moetis simulate` does: sweeps over clusters that do not exist yet, several models on one, and drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placement.costs import ModelSizes
from placement.errors import ConfigError
from placement.points import Point, mark_pareto
from placement.scaleout import ScaleOut, sample_layers, scale_out
from placement.sweep import MOST_COUNTED, Grid, rows_of, sweep
from placement.topology import Topology
from placement.trace import RoutingTrace
from placement.windows import DriftPoint, drift


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """One model's traffic. sizes come from origin, in words; num_layers: of the model, of which the trace may be a
    part."""

    name: str
    trace: RoutingTrace
    sizes: ModelSizes
    origin: str
    num_layers: int

    @property
    def layer_factor(self) -> float:
        return self.num_layers / self.trace.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The points of one model on one cluster."""

    model: str
    topology: str
    points: tuple[Point, ...]


def make_model(name: str, trace: RoutingTrace, sizes: ModelSizes, origin: str, most_layers: int) -> SimulatedModel:
    sampled, _ = sample_layers(trace, most_layers)
    return SimulatedModel(name=name, trace=sampled, sizes=sizes, origin=origin, num_layers=trace.num_layers)


def scales_of(
    topologies: Sequence[Topology], models: Sequence[SimulatedModel], group_gpus: int | None
) -> dict[tuple[str, str], ScaleOut]:
    """The cut of each cluster for each model, by (model, topology). Raises ConfigError for doubles, and as
    `scale_out`."""
    names = [topology.name for topology in topologies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"topology '{twice}' is given twice; results go by the topologies' names, so give each its own"
        )
    return {
        (model.name, topology.name): scale_out(topology, model.trace.num_experts, group_gpus)
        for model in models
        for topology in topologies
    }


def num_plans(scales: dict[tuple[str, str], ScaleOut], models: Sequence[SimulatedModel], grid: Grid) -> int:
    """How many steps of progress a simulation takes."""
    experts = {model.name: model.trace.num_experts for model in models}
    rows = sum(len(rows_of(scale, experts[name], grid.times)) for (name, _), scale in scales.items())
    return rows * len(grid.planners)


def simulate(
    models: Sequence[SimulatedModel],
    scales: dict[tuple[str, str], ScaleOut],
    grid: Grid,
    advance: Callable[[], None],
) -> list[Simulated]:
    """Sweep every model over every cluster. advance is called after each number of slots and planner."""
    found = []
    for (name, topology), scale in scales.items():
        model = next(model for model in models if model.name == name)
        points: list[Point] = []
        for part in sweep(model.trace, scale, grid, model.sizes, layer_factor=model.layer_factor):
            points += part
            advance()
        found.append(Simulated(model=name, topology=topology, points=tuple(mark_pareto(points))))
    return found


def shared_by_models(found: Sequence[Simulated], shares: Sequence[float]) -> list[dict[str, Any]]:
    """Several models on one cluster, taking turns: for each case that all have, memory of all and time per token.

    shares: of the tokens, by model, in the order of the models. A case is a cluster, phase, planner, batch, link, GPU
    share and the place among the numbers of slots.
    """
    if len({one.model for one in found}) < 2:
        return []
    names = list(dict.fromkeys(one.model for one in found))
    rows = []
    for topology in dict.fromkeys(one.topology for one in found):
        cases = [
            {_case(point, rank): point for point, rank in _ranked(one.points)}
            for name in names
            for one in found
            if one.model == name and one.topology == topology
        ]
        for case in cases[0]:
            if all(case in other for other in cases):
                rows.append(_together(topology, case, [other[case] for other in cases], shares))
    return rows


def _ranked(points: Sequence[Point]) -> list[tuple[Point, int]]:
    sizes = sorted({point.num_slots for point in points})
    return [(point, sizes.index(point.num_slots)) for point in points]


def _case(point: Point, rank: int) -> tuple[Any, ...]:
    return point.phase, point.planner, point.tokens_per_gpu, point.nic_gb_s, point.gpu_share, rank


def _together(topology: str, case: tuple[Any, ...], points: Sequence[Point], shares: Sequence[float]) -> dict[str, Any]:
    phase, planner, tokens_per_gpu, nic, gpu_share, _ = case
    seconds = sum(share / point.tokens_per_s for share, point in zip(shares, points, strict=True))
    traffic = sum(share * point.node_kb_per_token for share, point in zip(shares, points, strict=True))
    return {
        "topology": topology,
        "phase": phase,
        "planner": planner,
        "tokens_per_gpu": tokens_per_gpu,
        "nic_gb_s": nic,
        "gpu_share": gpu_share,
        "slots": [point.num_slots for point in points],
        "expert_gb": sum(point.expert_gb for point in points),
        "node_kb_per_token": traffic,
        "tokens_per_s": 1 / seconds,
    }


def token_shares(text: str | None, models: Sequence[SimulatedModel]) -> list[float]:
    """Each model's share of the tokens: from '3,1', else as in the traces. Raises ConfigError."""
    if text is None:
        weights = [float(model.trace.num_tokens) for model in models]
    else:
        weights = list(numbers(text, "--shares"))
        if len(weights) != len(models) or min(weights) < 0 or not 0 < sum(weights) < np.inf:
            raise ConfigError(f"--shares '{text}': give a share from 0 up for each of the {len(models)} traces")
    return [weight / sum(weights) for weight in weights]


def numbers(text: str, option: str) -> tuple[float, ...]:
    """'1.0,1.5' -> (1.0, 1.5). Raises ConfigError that names the option."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (float("nan"),)
    if not all(np.isfinite(found)):
        raise ConfigError(f"{option} '{text}': write numbers with commas between them, such as 1.0,1.5,2.0")
    return found


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """'64,256' -> (64, 256). Raises ConfigError that names the option."""
    found = numbers(text, option)
    if any(number != int(number) for number in found):
        raise ConfigError(f"{option} '{text}': write whole numbers with commas between them, such as 64,256")
    return tuple(int(number) for number in found)


def simulate_drift(
    model: SimulatedModel,
    scale: ScaleOut,
    *,
    windows: list[RoutingTrace],
    intervals: tuple[int, ...],
    times: float,
    grid: Grid,
    advance: Callable[[], None],
) -> list[DriftPoint]:
    """Serve window after window under each policy; advance is called after each. Raises as `cut_windows` and
    `drift`."""
    rows = rows_of(scale, model.trace.num_experts, [times])[0]
    served: list[DriftPoint] = []
    runs = drift(
        windows,
        scale.group,
        rows,
        intervals=intervals,
        expert_bytes=model.sizes.expert_bytes * model.layer_factor,
        seed=grid.seed,
        effort=grid.effort,
    )
    for points in runs:
        served += points
        advance()
    return served


def approximations(models: Sequence[SimulatedModel], scales: dict[tuple[str, str], ScaleOut], grid: Grid) -> list[str]:
    """What these figures take for granted, in words."""
    said = ["step times are of the MoE layers alone, by the cost model; plans take less effort than `moetis plan`'s"]
    for model in models:
        if model.trace.num_layers < model.num_layers:
            said.append(
                f"{model.name}: {model.trace.num_layers} of {model.num_layers} layers, evenly spread, stand for all"
            )
    for (name, topology), scale in scales.items():
        if scale.num_groups > 1:
            said.append(
                f"{name} on {topology}: {scale.num_groups} groups of {scale.group.num_ranks} GPUs, each with all "
                f"experts; one group is planned and replayed, the others are its like"
            )
    largest = max((*grid.decode_batches, *grid.prefill_batches), default=0)
    if any(scale.group.num_ranks * largest > MOST_COUNTED for scale in scales.values()):
        said.append(f"of steps above {MOST_COUNTED:,} tokens so many are counted, and grown to the step's size")
    return said


def names_of(traces: Sequence[str]) -> list[str]:
    """A name for each trace: its file's or folder's, made different with a number where it must."""
    names: list[str] = []
    for text in traces:
        stem = Path(text).resolve().stem or "trace"
        names.append(stem if stem not in names else f"{stem}-{len(names) + 1}")
    return names


def one_for_each(models: Sequence[str] | None, traces: Sequence[str]) -> Sequence[str | None]:
    """A --model for each trace, or none at all. Raises ConfigError."""
    if not models:
        return [None] * len(traces)
    if len(models) != len(traces):
        raise ConfigError(f"--model: give one for each of the {len(traces)} traces, got {len(models)}")
    return models
