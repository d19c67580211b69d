"""Which seats are taken: their tree, their placement, and where the missing weights come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.baselines import linear_placement
from placement.core import ExpertId, Placement
from placement.errors import PlacementError
from placement.seats import carry_over, plan_fetch, topology_of
from placement.topology import load_topology

LAYERS, EXPERTS = 2, 8
FULL = load_topology("2x2")
LOAD = np.ones((LAYERS, EXPERTS))


def _base(rows: int = 3) -> Placement:
    return linear_placement(LAYERS, EXPERTS, 4, rows)


def test_the_tree_of_some_seats_is_numbered_anew() -> None:
    topology = topology_of(FULL, [1, 2, 3])
    assert topology.num_ranks == 3
    assert topology.node_of_rank().tolist() == [0, 1, 1]


def test_seats_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"must be some of 0\.\.3"):
        topology_of(FULL, [1, 4])


def test_a_rank_that_stays_keeps_its_experts() -> None:
    base = _base()
    placement = carry_over(base, range(4), [0, 1, 3], LOAD, most_rows=6)
    assert placement.experts_on(1) >= base.experts_on(1) - placement.experts_on(0)
    assert placement.num_ranks == 3


def test_rows_grow_where_the_experts_would_not_fit() -> None:
    placement = carry_over(_base(2), range(4), [0, 3], LOAD, most_rows=4)
    assert placement.rows_per_rank == 4


def test_too_few_ranks_are_refused_with_what_helps() -> None:
    with pytest.raises(PlacementError, match=r"raise workers\.host_slab_rows"):
        carry_over(_base(), range(4), [2], LOAD, most_rows=6)


def test_a_rank_that_joins_gets_its_share() -> None:
    three = carry_over(_base(), range(4), [0, 1, 3], LOAD, most_rows=6)
    back = carry_over(three, [0, 1, 3], [0, 1, 2, 3], LOAD, most_rows=6)
    assert back.num_ranks == 4
    assert len(back.experts_on(2)) > 0


def test_a_lost_expert_comes_from_the_checkpoint_the_others_from_the_nearest_rank() -> None:
    held = [frozenset({ExpertId(0, 0), ExpertId(0, 1)}), frozenset(), frozenset({ExpertId(0, 0), ExpertId(0, 2)})]
    topology = topology_of(FULL, [0, 1, 2])
    target = Placement(
        epoch=1, num_ranks=3, num_experts=4, physical_to_logical=np.array([[0, 1, 0, 3, 2, -1]], np.int32)
    )
    fetch = plan_fetch(target, held, topology)
    (move,) = fetch.rounds[0]
    assert (move.expert, move.source.rank, move.target.rank) == (ExpertId(0, 0), 0, 1)
    assert fetch.restore == (frozenset(), frozenset({ExpertId(0, 3)}), frozenset())
    assert fetch.keep[0] >= {ExpertId(0, 0)}


def test_the_checkpoint_is_nearer_than_a_rank_behind_a_slower_link() -> None:
    held = [frozenset(_base().experts_on(0)), frozenset(), frozenset(), frozenset()]
    fast = plan_fetch(_base(), held, FULL, checkpoint_bandwidth=100e9)
    sources = {(move.source.rank, move.target.rank) for step in fast.rounds for move in step}
    assert sources <= {(0, 1)}
    slow = plan_fetch(_base(), held, FULL, checkpoint_bandwidth=1e9)
    assert sum(map(len, slow.restore)) < sum(map(len, fast.restore))


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(0, 3), min_size=2), st.sets(st.integers(0, 3), min_size=2), st.randoms())
def test_every_rank_gets_what_it_lacks_and_nothing_that_is_needed_is_freed(
    before: set[int], after: set[int], random: object
) -> None:
    old, new = sorted(before), sorted(after)
    first = carry_over(_base(), range(4), old, LOAD, most_rows=8)
    second = carry_over(first, old, new, LOAD, most_rows=8)
    held = [first.experts_on(old.index(seat)) if seat in old else frozenset[ExpertId]() for seat in new]
    fetch = plan_fetch(second, held, topology_of(FULL, new))
    has = [set(held[rank] & fetch.keep[rank]) | fetch.restore[rank] for rank in range(len(new))]
    for step in fetch.rounds:
        for move in step:
            assert move.expert in has[move.source.rank]
            has[move.target.rank].add(move.expert)
    for rank in range(len(new)):
        assert second.experts_on(rank) <= has[rank]
