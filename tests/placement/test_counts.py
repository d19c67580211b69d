"""Plans from counts alone: what they keep, what they level, and where copies go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.baselines import balance_placement, eplb_placement
from placement.counts import LEVEL_ENOUGH, Counts, plan_counts, ranks_to_nodes, score_counts
from placement.errors import PlacementError, TraceError
from placement.topology import load_topology


def _counts(layers: int, experts: int, seed: int = 0) -> Counts:
    return Counts(load=np.random.default_rng(seed).lognormal(0, 1, (layers, experts)), source="counts")


def test_copies_of_an_expert_lie_on_different_nodes() -> None:
    counts = Counts(load=np.array([[9.0, 1, 1, 1, 1, 1]]), source="counts")
    placement = plan_counts(counts, load_topology("2x2"), rows_per_rank=2).placement
    holds = placement.copies_per_rank()[0, :, 0].reshape(2, 2).sum(axis=1)
    assert holds.min() >= 1


def test_dealing_ranks_to_nodes_leaves_the_balance_over_ranks_as_it_was() -> None:
    counts, topology = _counts(3, 16), load_topology("3x2")
    made = plan_counts(counts, topology, rows_per_rank=4)
    level = score_counts(balance_placement(counts.load, 6, 4, enough=LEVEL_ENOUGH), topology, counts)
    assert made.measured["after"]["load_max_over_mean"] == pytest.approx(level["load_max_over_mean"])
    assert made.measured["after"]["node_load_max_over_mean"] <= level["node_load_max_over_mean"]


def test_a_layer_without_load_counts_for_nothing() -> None:
    counts, topology = _counts(2, 8), load_topology("2x2")
    with_dense = replace(counts, load=np.concatenate([np.zeros((1, 8)), counts.load]))
    alone, both = (plan_counts(one, topology, rows_per_rank=3).measured for one in (counts, with_dense))
    assert both["after"] == alone["after"]
    assert both["counts"]["layers_without_load"] == 1


def test_a_plan_from_the_plan_in_force_moves_nothing_where_the_counts_are_the_same() -> None:
    counts, topology = _counts(2, 12), load_topology("2x3")
    first = plan_counts(counts, topology, rows_per_rank=3).placement
    again = plan_counts(counts, topology, rows_per_rank=3, current=first).placement
    assert again.epoch == 1
    assert (again.physical_to_logical == first.physical_to_logical).all()


def test_counts_of_another_model_are_refused() -> None:
    topology = load_topology("2x2")
    present = plan_counts(_counts(2, 8), topology, rows_per_rank=3).placement
    with pytest.raises(TraceError, match="another model"):
        plan_counts(_counts(3, 8), topology, rows_per_rank=3, current=present)


def test_slots_that_hold_no_experts_are_refused() -> None:
    with pytest.raises(PlacementError, match="4 ranks x 1 slots"):
        plan_counts(_counts(1, 8), load_topology("2x2"), rows_per_rank=1)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 100))
def test_every_rank_gets_the_rows_of_one_other(nodes: int, gpus: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(6)[:2] for _ in range(nodes * gpus)]).astype(np.int32)
    source = ranks_to_nodes(rows, rng.random(6), np.repeat(np.arange(nodes), gpus).astype(np.int32))
    assert sorted(source.tolist()) == list(range(nodes * gpus))


DEEPSEEK = Path(__file__).parents[3] / "shared" / "traces" / "deepseek-v3-counts.npz"


@pytest.mark.skipif(not DEEPSEEK.exists(), reason=f"{DEEPSEEK} is not on this machine")
def test_a_plan_for_one_workload_of_deepseek_v3_is_no_worse_than_eplbs_on_the_others() -> None:
    topology = load_topology("4x8")
    with np.load(DEEPSEEK, allow_pickle=False) as archive:
        workloads = [Counts(load=archive[name].astype(np.float64), source=name) for name in archive.files]
    for fitted in workloads:
        made = plan_counts(fitted, topology, rows_per_rank=9).placement
        eplb = eplb_placement(fitted.load, 32, 9)
        for other in workloads:
            mine, theirs = (score_counts(one, topology, other) for one in (made, eplb))
            assert mine["load_max_over_mean"] <= theirs["load_max_over_mean"] + 1e-9


def test_a_layer_that_is_level_enough_is_left_as_the_greedy_has_it() -> None:
    counts = _counts(4, 32)
    greedy, fine = eplb_placement(counts.load, 4, 9), balance_placement(counts.load, 4, 9)
    enough = balance_placement(counts.load, 4, 9, enough=1.5)
    assert (enough.physical_to_logical == greedy.physical_to_logical).all()
    assert (fine.physical_to_logical != greedy.physical_to_logical).any()
