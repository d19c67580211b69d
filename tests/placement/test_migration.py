from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.core import ExpertId, Placement, Slot
from placement.errors import PlacementError
from placement.migration import MigrationPlan, Move, plan_migration
from placement.topology import Topology, load_topology, topology_from_dict


def _random_placement(rng: np.random.Generator, epoch: int, shape: tuple[int, int, int, int]) -> Placement:
    """Every expert somewhere, then copies wherever they fit; some rows stay empty."""
    layers, experts, ranks, rows = shape
    table = np.full((layers, ranks, rows), -1, np.int32)
    for layer in range(layers):
        for index, expert in enumerate(rng.permutation(experts)):
            table[layer, index % ranks, index // ranks] = expert
        for rank in range(ranks):
            for row in range(rows):
                expert = rng.integers(experts)
                if table[layer, rank, row] < 0 and expert not in table[layer, rank] and rng.random() < 0.6:
                    table[layer, rank, row] = expert
            rng.shuffle(table[layer, rank])
        rng.shuffle(table[layer])
    return Placement(epoch=epoch, num_ranks=ranks, num_experts=experts, physical_to_logical=table.reshape(layers, -1))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Placement, Placement, Topology]:
    nodes, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = nodes * gpus
    experts = draw(st.integers(1, 9))
    rows = -(-experts // ranks) + draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    shape = (draw(st.integers(1, 3)), experts, ranks, rows)
    return (
        _random_placement(rng, 0, shape),
        _random_placement(rng, 1, shape),
        load_topology(f"{nodes}x{gpus}"),
    )


def _moves(plan: MigrationPlan) -> list[Move]:
    return [move for moves in plan.rounds for move in moves]


@given(pairs(), st.integers(1, 3))
def test_copies_then_drops_lead_from_base_to_target(case: tuple[Placement, Placement, Topology], cap: int) -> None:
    base, target, topology = case
    plan = plan_migration(base, target, topology, 10, max_pair_bytes=10 * cap)
    held = {rank: set(base.experts_on(rank)) for rank in range(base.num_ranks)}
    for move in _moves(plan):
        assert move.expert in base.experts_on(move.source.rank)
        assert move.expert not in held[move.target.rank]
        held[move.target.rank].add(move.expert)
    for rank, drops in enumerate(plan.drops):
        held[rank] -= set(drops)
        assert held[rank] == target.experts_on(rank)


@given(pairs())
def test_no_rank_has_two_peers_in_a_round(case: tuple[Placement, Placement, Topology]) -> None:
    for moves in plan_migration(*case, 10).rounds:
        peers: dict[int, set[int]] = {}
        for move in moves:
            peers.setdefault(move.source.rank, set()).add(move.target.rank)
            peers.setdefault(move.target.rank, set()).add(move.source.rank)
        assert all(len(others) == 1 for others in peers.values())


@given(pairs())
def test_slots_named_in_a_move_hold_the_expert(case: tuple[Placement, Placement, Topology]) -> None:
    base, target, topology = case
    for move in _moves(plan_migration(base, target, topology, 10)):
        for placement, slot in ((base, move.source), (target, move.target)):
            physical = slot.rank * placement.rows_per_rank + slot.row
            assert placement.physical_to_logical[move.expert.layer, physical] == move.expert.expert


@given(pairs())
def test_a_copy_comes_from_the_own_node_where_one_is_there(case: tuple[Placement, Placement, Topology]) -> None:
    base, target, topology = case
    node = topology.node_of_rank()
    for move in _moves(plan_migration(base, target, topology, 10)):
        near = {
            rank
            for rank in range(base.num_ranks)
            if node[rank] == node[move.target.rank] and move.expert in base.experts_on(rank)
        }
        assert not near or move.source.rank in near


@given(pairs())
def test_a_placement_needs_no_move_to_become_itself(case: tuple[Placement, Placement, Topology]) -> None:
    base, _, topology = case
    plan = plan_migration(base, base.with_epoch(5), topology, 10)
    assert plan.rounds == ()
    assert plan.num_bytes == 0


@given(pairs())
def test_the_same_input_gives_the_same_plan(case: tuple[Placement, Placement, Topology]) -> None:
    assert plan_migration(*case, 10) == plan_migration(*case, 10)


def test_a_round_carries_no_more_than_a_pair_may_send() -> None:
    base = Placement(epoch=0, num_ranks=2, num_experts=4, physical_to_logical=[[0, 1, 2, 3]])
    target = Placement(epoch=1, num_ranks=2, num_experts=4, physical_to_logical=[[2, 3, 0, 1]])
    plan = plan_migration(base, target, load_topology("1x2"), 100, max_pair_bytes=100)
    assert [len(moves) for moves in plan.rounds] == [2, 2]
    assert plan.num_bytes == 400


def test_sources_are_spread_over_replicas() -> None:
    base = Placement(epoch=0, num_ranks=4, num_experts=2, physical_to_logical=[[0, 0, 1, -1]])
    target = Placement(epoch=1, num_ranks=4, num_experts=2, physical_to_logical=[[0, 0, 1, 1]])
    again = Placement(epoch=1, num_ranks=4, num_experts=2, physical_to_logical=[[1, 1, 0, 0]])
    topology = load_topology("4x1")
    assert len(_moves(plan_migration(base, target, topology, 1))) == 1
    sources = [move.source.rank for move in _moves(plan_migration(base, again, topology, 1)) if move.expert.expert == 0]
    assert sorted(sources) == [0, 1]


def test_placements_of_two_models_are_refused() -> None:
    one = Placement(epoch=0, num_ranks=2, num_experts=2, physical_to_logical=[[0, 1]])
    other = Placement(epoch=1, num_ranks=2, num_experts=2, physical_to_logical=[[0, 1]] * 2)
    with pytest.raises(PlacementError, match="from 1 layers to 2"):
        plan_migration(one, other, load_topology("1x2"), 1)


def test_the_target_epoch_must_lie_ahead() -> None:
    one = Placement(epoch=3, num_ranks=2, num_experts=2, physical_to_logical=[[0, 1]])
    with pytest.raises(PlacementError, match="must be above the base epoch 3"):
        plan_migration(one, one, load_topology("1x2"), 1)


def test_a_move_within_a_rank_is_no_move() -> None:
    with pytest.raises(PlacementError, match="already lives on rank 1"):
        Move(expert=ExpertId(0, 0), source=Slot(1, 0), target=Slot(1, 1))


def test_an_uneven_tree_is_served_too() -> None:
    topology = topology_from_dict({"name": "odd", "levels": [{"name": "node"}, {"name": "gpu"}], "tree": [[0], [1, 2]]})
    base = Placement(epoch=0, num_ranks=3, num_experts=3, physical_to_logical=[[0, 1, 2]])
    target = Placement(epoch=1, num_ranks=3, num_experts=3, physical_to_logical=[[2, 0, 1]])
    assert plan_migration(base, target, topology, 1).num_moves == 3
