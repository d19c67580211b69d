"""The drop-in: DeepSeek's golden case, the peers' behaviours, and a valid placement on every edge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.baselines import balance_placement, eplb_placement
from placement.eplb import rebalance_experts, rebalance_experts_from
from placement.errors import PlacementError
from placement.evaluate import max_over_mean

GOLDEN_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
GOLDEN_TABLE = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_readme_of_eplb_is_reproduced() -> None:
    phy2log, log2phy, logcnt = rebalance_experts(GOLDEN_LOAD, 16, 4, 2, 8)
    assert phy2log.tolist() == GOLDEN_TABLE
    assert (phy2log.dtype, log2phy.dtype, logcnt.dtype) == (np.int64,) * 3
    assert log2phy.shape == (2, 12, 2)
    assert (logcnt.sum(axis=1) == 16).all()
    assert log2phy[0, 5].tolist() == [0, 2]
    assert log2phy[0, 0].tolist() == [12, -1]


@pytest.mark.parametrize(
    ("load", "slots", "copies"),
    [
        ([10, 5, 2, 15, 8], 9, [2, 1, 1, 3, 2]),
        ([0, 0, 0, 0], 6, [2, 2, 1, 1]),
        ([0, 10, 0], 4, [1, 2, 1]),
        ([7, 7, 7], 3, [1, 1, 1]),
    ],
)
def test_copies_go_to_the_highest_load_per_copy(load: list[int], slots: int, copies: list[int]) -> None:
    assert rebalance_experts([load], slots, 0, 1, slots)[2].tolist() == [copies]


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_no_expert_is_lost_or_twice_on_a_gpu(
    layers: int, nodes: int, width: int, experts: int, groups: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    gpus = nodes * width
    rows = int(rng.integers(-(-experts // gpus), experts + 1))
    load = rng.integers(0, 100, (layers, experts)) * (rng.random((layers, experts)) < 0.6)
    phy2log, log2phy, logcnt = rebalance_experts(load, rows * gpus, groups, nodes, gpus)
    assert phy2log.shape == (layers, rows * gpus)
    assert (logcnt >= 1).all()
    for table in phy2log.reshape(-1, rows):
        held = table[table >= 0]
        assert len(set(held.tolist())) == len(held)
    for layer, expert in np.ndindex(logcnt.shape):
        assert (phy2log[layer, log2phy[layer, expert, : logcnt[layer, expert]]] == expert).all()


def test_loads_that_are_no_loads_count_as_zero_and_say_so() -> None:
    with pytest.warns(UserWarning, match="3 of 4 loads"):
        phy2log, _, _ = rebalance_experts([[np.nan, -3, np.inf, 5]], 8, 0, 1, 4)
    assert sorted(set(phy2log[0].tolist())) == [0, 1, 2, 3]


@pytest.mark.parametrize(("slots", "nodes", "gpus"), [(9, 1, 4), (8, 3, 4), (3, 1, 3), (0, 1, 1)])
def test_shapes_that_do_not_divide_or_hold_are_refused(slots: int, nodes: int, gpus: int) -> None:
    with pytest.raises(PlacementError):
        rebalance_experts([[1, 2, 3, 4]], slots, 0, nodes, gpus)


def test_the_old_table_is_kept_where_nothing_changed() -> None:
    load = np.random.default_rng(0).integers(1, 100, (3, 16))
    old = rebalance_experts_from(load, 20, 0, 2, 4)
    renamed = old.reshape(3, 4, 5)[:, [2, 3, 1, 0], ::-1].reshape(3, 20)
    assert (rebalance_experts_from(load, 20, 0, 2, 4, renamed) == renamed).all()


def test_swaps_after_the_greedy_never_worsen_the_balance() -> None:
    load = np.random.default_rng(1).zipf(1.5, (4, 32)).clip(max=500)
    worst = []
    for placement in (eplb_placement(load, 8, 5), balance_placement(load, 8, 5)):
        copies = placement.copies_per_rank()
        worst.append(max_over_mean((copies * (load / copies.sum(axis=1))[:, None, :]).sum(axis=2)))
    assert worst[1] <= worst[0]
