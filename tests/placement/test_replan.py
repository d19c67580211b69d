"""From a present placement: budgets kept, every prefix valid and no worse, the gate, the fast loop."""

from __future__ import annotations

import numpy as np
import pytest

from placement.baselines import balance_placement, linear_placement
from placement.core import EMPTY
from placement.errors import ConfigError, TraceError
from placement.evaluate import evaluate, max_over_mean
from placement.gate import weigh
from placement.homes import homes_of
from placement.plan import plan_placement
from placement.relevel import relevel
from placement.replan import apply_changes, num_copies_between, rank_blocks, replan_within
from placement.shares import load_per_rank
from placement.topology import load_topology
from tests.placement.planner_cases import make_trace

TRACE = make_trace(num_tokens=3000, num_experts=16, top_k=3, num_requests=60, num_kinds=4, seed=1)
CLUSTER = load_topology("4x1")
HOMES = homes_of(TRACE, 4)


@pytest.mark.parametrize("most_copies", [0, 1, 5, 40])
def test_a_replan_stays_within_its_budget(most_copies: int) -> None:
    current = linear_placement(2, 16, 4, 5)
    found = replan_within(current, CLUSTER, TRACE, HOMES, most_copies=most_copies)
    assert found.num_copies <= most_copies
    assert num_copies_between(current, found.placement) <= most_copies
    assert found.placement.epoch == 1


def test_every_prefix_is_a_valid_placement_and_no_worse_than_before() -> None:
    current = linear_placement(2, 16, 4, 5)
    found = replan_within(current, CLUSTER, TRACE, HOMES, most_copies=30)
    assert len(found.changes) > 5
    costs = []
    for number in range(len(found.changes) + 1):
        score = evaluate(apply_changes(current, found.changes[:number]), CLUSTER, TRACE, HOMES)
        costs.append(score.nodes_visited + 4 * score.load_max_over_mean)
    assert max(costs) <= costs[0] + 0.02
    assert costs[-1] < costs[0] - 0.1


def test_more_than_64_ranks_are_replanned_in_blocks_of_whole_nodes() -> None:
    cluster, trace = load_topology("20x4"), make_trace(num_tokens=3000, num_experts=80, top_k=4, num_requests=60)
    assert [len(block) for block in rank_blocks(cluster.node_of_rank())] == [64, 16]
    current, homes = linear_placement(2, 80, 80, 1), homes_of(trace, 80)
    found = replan_within(current, cluster, trace, homes, most_copies=60)
    before, after = (evaluate(one, cluster, trace, homes) for one in (current, found.placement))
    assert 0 < found.num_copies <= 60
    assert after.nodes_visited + 4 * after.load_max_over_mean < before.nodes_visited + 4 * before.load_max_over_mean


def test_a_node_of_more_than_64_ranks_is_a_matter_of_blocks_too() -> None:
    assert [len(block) for block in rank_blocks(np.repeat(np.arange(2), 72))] == [64, 8, 64, 8]


def test_rows_that_a_rank_does_not_have_stay_empty() -> None:
    sizes = np.array([5, 5, 5, 2])
    current = plan_placement(TRACE, CLUSTER, rows_per_rank=sizes.tolist(), effort=0.1)
    found = replan_within(current, CLUSTER, TRACE, HOMES, most_copies=40, rows_of_rank=sizes)
    load = np.random.default_rng(0).gamma(1.0, 100.0, (2, 16))
    levelled = relevel(current, load, most_copies=10, rows_of_rank=sizes)
    for placement in (found.placement, levelled):
        assert (placement.physical_to_logical.reshape(2, 4, 5)[:, 3, 2:] == EMPTY).all()


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 copies or more, got -1"):
        replan_within(linear_placement(2, 16, 4, 4), CLUSTER, TRACE, HOMES, most_copies=-1)


@pytest.mark.parametrize(
    ("after", "copies", "worth_it"), [(0.9, 10, True), (0.9, 100_000, False), (1.1, 10, False), (0.9, 0, False)]
)
def test_the_gate_weighs_the_saving_against_the_moves(after: float, copies: int, worth_it: bool) -> None:
    verdict = weigh(
        step_before_s=1.0,
        step_after_s=after,
        steps_in_horizon=100,
        num_copies=copies,
        expert_bytes=1e6,
        copy_bandwidth=1e9,
    )
    assert verdict.worth_it == worth_it
    assert verdict.reason


def balance(placement, load) -> float:  # type: ignore[no-untyped-def]
    return max_over_mean(load_per_rank(placement, load))


def test_the_fast_loop_levels_a_changed_load_with_few_copies() -> None:
    rng = np.random.default_rng(0)
    load = rng.gamma(2.0, 100.0, (6, 64))
    current = balance_placement(load.astype(np.int64), 8, 10)
    changed = load * (1 + 0.2 * rng.normal(size=load.shape)).clip(0.1)
    fresh = balance_placement(changed.astype(np.int64), 8, 10)
    budget = int(0.15 * current.physical_to_logical.size)
    kept = relevel(current, changed, most_copies=budget)
    assert num_copies_between(current, kept) <= budget
    assert balance(kept, changed) <= 1.02 * balance(fresh, changed)
    assert balance(kept, changed) < balance(current, changed)


def test_a_level_placement_is_left_alone() -> None:
    load = np.full((2, 8), 5.0)
    current = linear_placement(2, 8, 4, 2)
    assert (relevel(current, load, most_copies=9).physical_to_logical == current.physical_to_logical).all()
    assert (relevel(current, load * 0, most_copies=9).physical_to_logical == current.physical_to_logical).all()


def test_a_load_of_another_model_is_refused() -> None:
    with pytest.raises(TraceError, match=r"\[2, 9\], but the placement has 2 layers x 8 experts"):
        relevel(linear_placement(2, 8, 4, 2), np.ones((2, 9)), most_copies=1)
