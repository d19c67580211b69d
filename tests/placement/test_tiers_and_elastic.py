"""Tiers within their budgets; ranks that leave and join."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.baselines import linear_placement, random_placement
from placement.core import Tier
from placement.elastic import place_with_joined, place_without
from placement.errors import ConfigError, PlacementError
from placement.relevel import relevel
from placement.replan import num_copies_between
from placement.tiers import TierBudget, choose_tiers
from placement.topology import load_topology

ACTIVATED = np.array([[0.9, 0.1, 0.5, 0.3], [0.2, 0.8, 0.4, 0.6]])


def budget(**changes: float) -> TierBudget:
    values = {"gpu_slots": 4, "host_bytes": 100.0, "expert_bytes": 10.0, "cold_bytes": 3.0} | changes
    return TierBudget(**values)  # type: ignore[arg-type]


def test_the_most_read_are_hot_and_the_hit_rate_is_their_share() -> None:
    plan = choose_tiers(linear_placement(2, 4, 1, 4), load_topology("1x1"), ACTIVATED, budget())
    tiers = plan.placement.tiers
    assert tiers[0, 0] == tiers[1, 1] == Tier.HOT
    assert (tiers == Tier.HOT).sum() == 2
    assert plan.hit_rate == pytest.approx((0.9 + 0.8 + 0.6 + 0.5) / ACTIVATED.sum())
    assert plan.stall_s > 0


def test_host_bytes_that_do_not_do_are_met_by_quantising_then_by_disk() -> None:
    placement, topology = linear_placement(2, 4, 1, 4), load_topology("1x1")
    quantised = choose_tiers(placement, topology, ACTIVATED, budget(host_bytes=30.0)).placement.tiers
    assert (quantised == Tier.COLD).sum() == 5
    assert (quantised == Tier.WARM).sum() == 1
    scarce = choose_tiers(placement, topology, ACTIVATED, budget(host_bytes=9.0))
    assert scarce.num_disk == 3


def test_everything_fits_on_the_gpu_and_nothing_stalls() -> None:
    plan = choose_tiers(linear_placement(2, 4, 2, 2), load_topology("1x2"), ACTIVATED, budget())
    assert (plan.placement.tiers == Tier.HOT).all()
    assert (plan.hit_rate, plan.stall_s, plan.num_disk) == (1.0, 0.0, 0)


def test_a_tier_budget_checks_itself() -> None:
    with pytest.raises(ConfigError, match="gpu_slots >= 1"):
        budget(gpu_slots=0)
    with pytest.raises(ConfigError, match="cold_bytes"):
        budget(cold_bytes=11.0)


@given(st.integers(2, 6), st.integers(1, 10), st.integers(0, 3), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_survivors_keep_their_experts_and_nothing_is_lost(
    num_ranks: int, num_experts: int, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = min(num_experts, -(-num_experts // num_ranks) + spare)
    current = random_placement(2, num_experts, num_ranks, rows, seed=seed % 97)
    lost = frozenset(rng.permutation(num_ranks)[: rng.integers(0, num_ranks)].tolist())
    live = num_ranks - len(lost)
    wider = max(rows, -(-num_experts // live))
    found = place_without(current, lost, rng.random((2, num_experts)), rows_per_rank=wider)
    before, after = current.copies_per_rank(), found.placement.copies_per_rank()
    assert (after.sum(axis=1) > 0).all()
    replaced = ((before[:, list(found.live_ranks)] > 0) & (after == 0)).sum()
    assert replaced <= found.copied == len(found.from_checkpoint)


def test_losing_the_last_copy_without_a_checkpoint_is_refused() -> None:
    current = linear_placement(1, 4, 4, 2)
    assert place_without(current, frozenset({0}), np.ones((1, 4)), has_checkpoint=False).copied == 0
    with pytest.raises(PlacementError, match="lost ranks alone"):
        place_without(current, frozenset({0, 3}), np.ones((1, 4)), has_checkpoint=False)


def test_too_few_slots_left_say_how_many_rows_would_do() -> None:
    with pytest.raises(PlacementError, match="give at least 4 rows per rank"):
        place_without(linear_placement(1, 8, 4, 2), frozenset({0, 1}), np.ones((1, 8)))


def test_all_ranks_or_unknown_ones_cannot_be_lost() -> None:
    for lost in (frozenset({0, 1}), frozenset({5})):
        with pytest.raises(PlacementError, match="some, not all"):
            place_without(linear_placement(1, 4, 2, 2), lost, np.ones((1, 4)))


def test_joined_ranks_start_empty_and_are_filled_by_the_fast_loop() -> None:
    current = linear_placement(1, 8, 2, 4)
    larger = place_with_joined(current, 2)
    assert larger.num_ranks == 4
    filled = relevel(larger, np.ones((1, 8)), most_copies=8)
    assert 0 < num_copies_between(larger, filled) <= 8
    assert filled.copies_per_rank()[0].sum(axis=1).min() > 0
