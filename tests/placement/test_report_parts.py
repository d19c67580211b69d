from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.baselines import linear_placement
from placement.core import ExpertId, Slot, Tier
from placement.migration import MigrationPlan, Move
from placement.report.activation import count_activation
from placement.report.affinity import coactivation_maps, transition_maps
from placement.report.cachecurve import cache_curve
from placement.report.figures import pack
from placement.report.memory import count_memory
from placement.report.partly import best_part, copies_by_layer, take_part
from placement.report.promises import PastEpoch, promises_in_words
from placement.report.rounds import round_figures
from placement.topology import load_topology
from placement.trace import RoutingTrace


def _trace(experts: list[list[list[int]]], num_experts: int = 8, **more: object) -> RoutingTrace:
    """experts [tokens][layers][top_k]; one request, positions in order."""
    tokens = len(experts)
    values: dict[str, object] = {
        "num_experts": num_experts,
        "experts": np.array(experts, np.uint8),
        "request": np.zeros(tokens, np.int64),
        "position": np.arange(tokens, dtype=np.int32),
        "step": np.zeros(tokens, np.int64),
        "source_rank": np.full(tokens, -1, np.int32),
        "phase": np.zeros(tokens, np.uint8),
    }
    return RoutingTrace(**values | more)  # type: ignore[arg-type]


def test_the_best_cache_is_never_worse_and_a_whole_one_misses_only_first_reads() -> None:
    rng = np.random.default_rng(1)
    experts = rng.random((400, 2, 8)).argsort(axis=2)[:, :, :2]
    trace = replace(_trace(experts.tolist()), request=np.repeat(np.arange(20), 20))
    curve = cache_curve(linear_placement(2, 8, 4, 2), load_topology("2x2"), trace)
    assert (curve.belady >= curve.lru).all()
    assert (np.diff(curve.belady) >= 0).all()
    assert curve.lru[-1] == curve.belady[-1] == 1 - 2 * 8 / curve.num_reads
    assert (curve.streams, curve.slots.tolist()) == (16, [1, 2])


def test_recorded_steps_are_kept() -> None:
    trace = _trace([[[0, 1]], [[1, 2]], [[0, 1]]], step=np.array([7, 7, 9]))
    curve = cache_curve(linear_placement(1, 8, 1, 8), load_topology("1x1"), trace)
    # Step 7 reads 0, 1, 2 once each, step 9 reads 0 and 1 again.
    assert (curve.streams, curve.num_steps, curve.num_reads) == (None, 2, 5)
    assert curve.lru[-1] == 2 / 5


def test_activation_is_the_share_of_a_bins_tokens() -> None:
    trace = _trace(
        [[[0, 1]], [[0, 2]], [[3, 4]], [[3, 5]]],
        position=np.array([0, 0, 1, 1], np.int32),
        workload=np.array([0, 1, 1, 1], np.uint8),
        workload_names=("code",),
    )
    found = count_activation(trace)
    assert (found.kinds, found.tokens, found.bins) == (("code", "workload 1"), (1, 3), ["0", "1"])
    assert found.share[1, 0, 0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert found.share[1, 0, 1, 3:6].tolist() == [1, 0.5, 0.5]
    assert np.isnan(found.share[0, 0, 1]).all()


def test_kinds_are_phases_where_there_are_no_workloads() -> None:
    trace = _trace([[[0, 1]], [[0, 2]]], phase=np.array([1, 0], np.uint8))
    assert count_activation(trace).kinds == ("decode", "prefill")


def test_the_smallest_kinds_are_left_out() -> None:
    trace = _trace([[[0, 1]]] * 12, workload=np.array([*range(10), 9, 9], np.uint8))
    found = count_activation(trace)
    assert (len(found.kinds), found.left_out, found.tokens[-1]) == (8, 2, 3)


def test_pairs_and_steps_stand_in_the_order_of_ranks() -> None:
    trace = _trace([[[0, 1], [2, 3]], [[0, 1], [2, 0]]], num_experts=4)
    placement = replace(linear_placement(2, 4, 2, 2), physical_to_logical=[[3, 0, 1, 2], [0, 1, 2, 3]])
    pairs, steps = coactivation_maps(placement, trace), transition_maps(placement, trace)
    assert pairs[0].rows.tolist() == [3, 0, 1, 2]
    assert pairs[0].strongest(5) == [(1, 0, 1.0)]
    assert steps[0].strongest(2) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert steps[0].share.sum() == 4


def test_of_very_many_experts_the_busiest_are_shown() -> None:
    experts = np.arange(800, dtype=np.uint16).reshape(400, 1, 2)
    trace = replace(_trace([[[0, 1]]] * 400, num_experts=800), experts=experts)
    (pairs,) = coactivation_maps(linear_placement(1, 800, 2, 400), trace)
    assert pairs.share.shape == (529, 529)
    assert pairs.rows.tolist() == list(range(529))


def test_one_layer_has_no_steps() -> None:
    assert transition_maps(linear_placement(1, 8, 4, 2), _trace([[[0, 1]]])) == ()


def test_memory_counts_slots_by_tier() -> None:
    tiers = np.full((2, 4), Tier.WARM, np.uint8)
    tiers[0, 0] = Tier.HOT
    placement = replace(linear_placement(2, 2, 2, 2), physical_to_logical=[[0, -1, 1, 0], [1, -1, 0, -1]], tiers=tiers)
    memory = count_memory(placement)
    assert memory.tiers == [Tier.HOT, Tier.WARM]
    assert memory.slots[:, Tier.HOT].tolist() == [1, 0]
    assert (memory.filled.tolist(), memory.empty.tolist()) == ([2, 3], [2, 1])


def test_a_round_takes_as_long_as_its_busiest_link() -> None:
    """Two pairs of ranks of two nodes: each node's link carries two experts out and none in."""
    moves = tuple(Move(expert=ExpertId(0, rank), source=Slot(rank, 0), target=Slot(rank + 2, 0)) for rank in (0, 1))
    migration = MigrationPlan(base_epoch=0, target_epoch=1, expert_bytes=45 * 10**6, rounds=(moves,), drops=((),) * 4)
    (figure,) = round_figures(migration, load_topology("2x2"), sized=True)
    assert (figure.pairs, figure.moves, figure.num_bytes) == (2, 2, 90 * 10**6)
    assert figure.seconds == pytest.approx(15e-6 + 90e6 / 45e9)
    assert round_figures(migration, load_topology("2x2"), sized=False)[0].seconds is None


def test_a_part_is_the_layers_that_gain_most_for_a_copy() -> None:
    part = best_part(np.full(4, 2.0), np.array([1.0, 1.9, 2.0, 1.95]), np.array([10, 10, 10, 10]))
    assert part is not None
    assert (part.layers, part.copies) == ((0, 1), 0.5)
    assert part.saving == pytest.approx(1.1 / 1.15)


@pytest.mark.parametrize(
    ("after", "copies"),
    [([1.0, 1.0], [10, 10]), ([2.1, 2.1], [1, 1]), ([1.0, 2.0], [0, 0])],
    ids=["even", "loss", "no copies"],
)
def test_a_plan_that_gains_evenly_or_not_at_all_has_no_part(after: list[float], copies: list[int]) -> None:
    assert best_part(np.full(2, 2.0), np.array(after), np.array(copies)) is None


def test_a_part_of_a_plan_is_a_placement() -> None:
    before = linear_placement(2, 8, 4, 2)
    weights = np.full((2, 4), 7, np.uint16)
    after = replace(before, epoch=3, physical_to_logical=before.physical_to_logical[:, ::-1], rank_weights=weights)
    part = take_part(before, after, (1,))
    assert part.epoch == 3
    assert part.rank_weights.tolist() == [before.rank_weights[0].tolist(), [7] * 4]
    assert copies_by_layer(before, part).tolist() == [0, copies_by_layer(before, after)[1]]


@pytest.mark.parametrize(
    ("found", "verdict"), [(None, "not known yet"), (1.5, "kept"), (1.58, "kept"), (1.7, "not kept")]
)
def test_a_promise_is_kept_within_its_interval(found: float | None, verdict: str) -> None:
    epoch = PastEpoch(epoch=1, at="", state="served", reason="", before=2.0, promised=1.5, most=1.55, found=found)
    assert epoch.verdict == verdict


def test_promises_are_counted_in_words() -> None:
    unknown = PastEpoch(epoch=1, at="", state="served", reason="")
    assert "No past plan has been measured" in promises_in_words((unknown,))
    kept = replace(unknown, promised=1.0, found=1.0)
    assert "1 of 2 past plans" in promises_in_words((kept, replace(kept, found=2.0), unknown))


@given(st.lists(st.floats(0, 1e9) | st.just(float("nan")), min_size=1, max_size=9))
def test_cells_travel_to_within_a_part_in_65_thousand_of_the_largest(values: list[float]) -> None:
    import base64

    packed = pack(np.array([values]))
    words = np.frombuffer(base64.b64decode(packed["packed"]), "<u2")
    back = np.where(words == 65_535, np.nan, words * packed["scale"])
    largest = np.nanmax([*values, 0.0])
    np.testing.assert_allclose(back, values, atol=largest / 65_000 + 1e-300, equal_nan=True)
