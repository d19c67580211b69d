"""The search: swap and replace experts between the units of one tree level, on the true objective.

A problem is one layer at one tree group: units are the group's children (at most 64, a bit each). Every sampled token
has the experts that this group must serve for it and the unit of its home, or no home here. The search keeps, for each
token, the units that serve it under the dispatch rule (home, then fewest), so the objective is what dispatch will do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.search import Weights, anneal, start_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Tokens of one problem. chosen int16 [S, K], -1 pads; home int16 [S], -1 elsewhere; group uint8 [S].

    Tokens of one group were drawn under one home policy; each group's balance is judged by itself.
    """

    chosen: NDArray[np.int16]
    home: NDArray[np.int16]
    group: NDArray[np.uint8]

    def __post_init__(self) -> None:
        assert len(self.chosen) == len(self.home) == len(self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """visit: the worth of one other unit (node) visited per token; balance: of load max/mean rising by 1.

    unit_visit: the worth of one other unit visited inside nodes, where units lie in nodes.

    step_tokens: the batch whose imbalance is judged; spread: how many standard deviations of its load count.
    home_spread: the relative deviation of the number of tokens that are at home at a unit.
    """

    visit: float = 1.0
    balance: float = 1.0
    step_tokens: int = 256
    spread: float = 1.0
    home_spread: float = 0.1
    unit_visit: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One run of the search: on how many tokens of each group, how many proposals, from how hot to how cold.

    Heat is in units of the objective: a change that makes it worse by up to a random part of the heat is taken.
    Steady: by up to the heat itself; below zero, a change must gain that much.
    """

    tokens: int
    proposals: int
    hot: float = 0.0
    cold: float = 0.0
    steady: bool = False


def refine(
    slots: NDArray[np.int32],
    sizes: NDArray[np.int64],
    share: NDArray[np.float64],
    sample: Sample,
    num_experts: int,
    costs: Costs,
    stage: Stage,
    seed: int,
    node_of_unit: NDArray[np.int32] | None = None,
    fewest: NDArray[np.int64] | None = None,
) -> NDArray[np.int32]:
    """Search from slots [U, C] (expert ids, -1 empty; unit u uses the first sizes[u]). Returns the best slots found.

    share [U], summing to 1, is the part of the load that each unit should carry. Every expert keeps a copy, or as
    many as fewest [E] says.
    node_of_unit [U] where units lie in nodes; else each unit is its own.
    """
    return refine_logged(slots, sizes, share, sample, num_experts, costs, stage, seed, node_of_unit, fewest)[0]


def refine_logged(
    slots: NDArray[np.int32],
    sizes: NDArray[np.int64],
    share: NDArray[np.float64],
    sample: Sample,
    num_experts: int,
    costs: Costs,
    stage: Stage,
    seed: int,
    node_of_unit: NDArray[np.int32] | None = None,
    fewest: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """As `refine`, and the changes [n, 5] that lead from slots to the result, in order: (unit, row, unit, row, swap).

    A change copies the second slot's expert into the first, and in a swap the first's into the second.
    """
    result = np.ascontiguousarray(slots, np.int32).copy()
    thinned = thin(sample, stage.tokens)
    log = np.zeros((stage.proposals, 5), np.int64)
    if len(result) == 1 or not len(thinned.chosen) or not stage.proposals:
        return result, log[:0]
    nodes = np.arange(len(result)) if node_of_unit is None else node_of_unit
    weights = Weights(
        costs.visit, costs.unit_visit, costs.balance, float(costs.step_tokens), costs.spread, costs.home_spread
    )
    state = start_state(
        result,
        np.ascontiguousarray(nodes, np.int64),
        np.ascontiguousarray(thinned.chosen, np.int16),
        np.ascontiguousarray(thinned.home, np.int16),
        np.ascontiguousarray(thinned.group, np.uint8),
        np.ones(num_experts, np.int64) if fewest is None else fewest,
        weights,
    )
    taken = anneal(
        result,
        np.asarray(sizes, np.int64),
        np.asarray(share, np.float64),
        state,
        stage.proposals,
        stage.hot,
        stage.cold,
        stage.steady,
        seed,
        log,
    )
    return result, log[:taken]


def thin(sample: Sample, num_tokens: int) -> Sample:
    """Every n-th token, so that about num_tokens of each group stay. The sample's order must be random."""
    step = max(1, len(sample.chosen) // (num_tokens * (int(sample.group.max(initial=0)) + 1)))
    return Sample(chosen=sample.chosen[::step], home=sample.home[::step], group=sample.group[::step])
