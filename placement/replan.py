"""From a present placement: few moves, best first, each of which helps by itself; and the gate that may say no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY, Placement
from placement.cover import MOST_UNITS
from placement.errors import ConfigError, PlacementError
from placement.evaluate import check_fit
from placement.refine import Costs, Sample, Stage, refine_logged
from placement.topology import Topology
from placement.trace import RoutingTrace

REPLAN_COSTS = Costs(visit=1.0, unit_visit=0.02, balance=4.0)
PASSES = (0.02, 0.008, 0.003, 0.001)
SAMPLED_TOKENS = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of a re-plan in one layer: slots (physical ids) and the experts that lie in them afterwards.

    A replacement fills one slot, a swap two; each slot filled is one expert copied.
    """

    layer: int
    slots: tuple[int, ...]
    experts: tuple[int, ...]

    @property
    def num_copies(self) -> int:
        return sum(expert != EMPTY for expert in self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """placement: the result, epoch one on. changes: the steps that lead there, best first.

    After any number of them the placement is valid and, on the traffic it was fitted on, no worse than before.
    """

    placement: Placement
    changes: tuple[Change, ...]

    @property
    def num_copies(self) -> int:
        return sum(change.num_copies for change in self.changes)


def apply_changes(current: Placement, changes: tuple[Change, ...]) -> Placement:
    """The placement after some changes, in order; its epoch is the current one's plus 1."""
    table = current.physical_to_logical.copy()
    for change in changes:
        table[change.layer, list(change.slots)] = change.experts
    return Placement(
        epoch=current.epoch + 1,
        num_ranks=current.num_ranks,
        num_experts=current.num_experts,
        physical_to_logical=table,
        tiers=current.tiers,
    )


def replan_within(
    current: Placement,
    topology: Topology,
    trace: RoutingTrace,
    homes: NDArray[np.int32],
    *,
    most_copies: int,
    costs: Costs = REPLAN_COSTS,
    seed: int = 0,
) -> Replan:
    """Improve the current placement by at most most_copies expert copies, the most useful ones first.

    homes [T]. A change is taken only if it lowers the objective by more than the pass's threshold; thresholds fall from
    pass to pass over all layers, so what gains most comes first. Raises ConfigError for a negative budget or more than
    64 ranks, PlacementError for a placement that does not fit.
    """
    check_fit(current, topology, trace)
    if most_copies < 0:
        raise ConfigError(f"the budget must be 0 copies or more, got {most_copies}")
    if topology.num_ranks > MOST_UNITS:
        raise ConfigError(f"a re-plan within a budget takes at most {MOST_UNITS} ranks, got {topology.num_ranks}")
    rng = np.random.default_rng(seed)
    pick = rng.permutation(trace.num_tokens)[:SAMPLED_TOKENS]
    home = np.ascontiguousarray(homes[pick], np.int16)
    rows = current.physical_to_logical.reshape(current.num_layers, current.num_ranks, -1).copy()
    changes: list[Change] = []
    left = most_copies
    for number, threshold in enumerate(PASSES):
        for layer in rng.permutation(current.num_layers):
            if left < 1:
                break
            sample = Sample(
                chosen=trace.experts[pick, layer].astype(np.int16), home=home, group=np.zeros(len(pick), np.uint8)
            )
            found = _improve_layer(rows[layer], sample, topology, trace.num_experts, costs, threshold, seed + number)
            taken = _within(found, int(layer), rows[layer], left)
            changes += taken
            left -= sum(change.num_copies for change in taken)
    return Replan(placement=apply_changes(current, tuple(changes)), changes=tuple(changes))


def _improve_layer(
    rows: NDArray[np.int32],
    sample: Sample,
    topology: Topology,
    num_experts: int,
    costs: Costs,
    threshold: float,
    seed: int,
) -> NDArray[np.int64]:
    """Changes [n, 5] of `refine_logged` that each gain more than threshold."""
    num_ranks, width = rows.shape
    stage = Stage(tokens=SAMPLED_TOKENS, proposals=20 * rows.size, hot=-threshold, cold=-threshold, steady=True)
    share, sizes = np.full(num_ranks, 1 / num_ranks), np.full(num_ranks, width)
    _, log = refine_logged(rows, sizes, share, sample, num_experts, costs, stage, seed, topology.node_of_rank())
    return log


def _within(log: NDArray[np.int64], layer: int, rows: NDArray[np.int32], left: int) -> list[Change]:
    """The first changes that fit into what is left of the budget; rows [R, C] is brought up to date."""
    taken = []
    width = rows.shape[1]
    for one, row, two, other, swap in log.tolist():
        slots, experts = [one * width + row], [int(rows[two, other])]
        if swap:
            slots.append(two * width + other)
            experts.append(int(rows[one, row]))
        change = Change(layer=layer, slots=tuple(slots), experts=tuple(experts))
        if change.num_copies > left:
            break
        rows.reshape(-1)[slots] = experts
        taken.append(change)
        left -= change.num_copies
    return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a change is worth it: seconds saved over the horizon against seconds that the moves cost."""

    worth_it: bool
    saved_s: float
    moving_s: float
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "worth_it": self.worth_it,
            "saved_s": self.saved_s,
            "moving_s": self.moving_s,
            "reason": self.reason,
        }


def weigh(
    *,
    step_before_s: float,
    step_after_s: float,
    steps_in_horizon: float,
    num_copies: int,
    expert_bytes: float,
    copy_bandwidth: float,
    slowdown: float = 1.0,
) -> Verdict:
    """The gate. step_..._s: modelled step times; copy_bandwidth: bytes/s at which weights move in all.

    slowdown: the share of serving time lost while weights move (1: serving stands still). Raises ConfigError where the
    horizon, the bytes or the bandwidth make no sense.
    """
    if steps_in_horizon < 0 or copy_bandwidth <= 0 or expert_bytes < 0:
        raise ConfigError(
            f"the gate needs steps >= 0, bytes >= 0 and a bandwidth above 0; got {steps_in_horizon}, {expert_bytes}, "
            f"{copy_bandwidth}"
        )
    saved = (step_before_s - step_after_s) * steps_in_horizon
    moving = num_copies * expert_bytes / copy_bandwidth * slowdown
    if num_copies == 0:
        return Verdict(worth_it=False, saved_s=saved, moving_s=0.0, reason="nothing would move")
    if saved <= 0:
        return Verdict(worth_it=False, saved_s=saved, moving_s=moving, reason="no step would be faster")
    reason = f"{saved:.3g} s saved over the horizon, {moving:.3g} s to move {num_copies} experts"
    return Verdict(worth_it=saved > moving, saved_s=saved, moving_s=moving, reason=reason)


def num_copies_between(current: Placement, target: Placement) -> int:
    """Experts that must be copied to a rank that does not have them. Raises PlacementError where shapes differ."""
    before, after = current.copies_per_rank(), target.copies_per_rank()
    if before.shape != after.shape:
        raise PlacementError(f"the placements are of shapes {before.shape} and {after.shape}; they must be of one")
    return int(((after > 0) & (before == 0)).sum())
