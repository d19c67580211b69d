"""Sweeps over clusters that do not exist, drift over windows, screening, and the calibration of the cost model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.baselines import linear_placement, random_placement
from placement.batches import draw_steps, phase_tokens
from placement.calibrate import fit_costs, predict
from placement.comparing import Serving
from placement.costs import ModelSizes
from placement.errors import ConfigError, TopologyError, TraceError
from placement.homes import random_homes
from placement.layers import all_moe
from placement.points import Point, mark_pareto
from placement.scaleout import sample_layers, scale_out, with_nic
from placement.screening import NO, UNSURE, screen
from placement.stepcounts import count_steps
from placement.sweep import Grid, rows_of, sweep
from placement.topology import load_topology, topology_from_dict
from placement.trace import DECODE
from placement.windows import cut_windows, drift
from tests.placement.planner_cases import make_trace

QUICK = Grid(times=(1.0, 2.0), planners=("moetis", "eplb"), decode_batches=(4,), prefill_batches=(8,), effort=0.02)
SERVING = Serving(sizes=ModelSizes(), decode_batch=40, prefill_batch=80)


def points_of(text: str, grid: Grid, group_gpus: int | None = None) -> list[Point]:
    trace = make_trace(num_tokens=600, num_requests=40)
    scale = scale_out(load_topology(text), trace.num_experts, group_gpus)
    return [point for part in sweep(trace, scale, grid, ModelSizes()) for point in part]


def test_ten_thousand_gpus_are_groups_of_one_plan() -> None:
    points = points_of("1250x8", QUICK)
    assert {(point.num_gpus, point.group_gpus, point.num_groups) for point in points} == {(10_000, 8, 1250)}
    single = points_of("1x8", QUICK)
    assert [point.mean_s for point in points] == [point.mean_s for point in single]
    assert points[0].tokens_per_s == pytest.approx(1250 * single[0].tokens_per_s)
    assert points[0].slowest_group_s >= points[0].mean_s


def test_slower_links_and_less_memory_cost_time_and_more_slots_save_traffic() -> None:
    grid = replace(
        QUICK, planners=("moetis", "moetis-routed"), nics=(1.0, 45.0), gpu_shares=(0.5, 1.0), times=(1.0, 2.0)
    )
    points = points_of("4x2", grid)
    assert len(points) == 2 * 2 * 2 * 2 * 2

    def one(**wanted: object) -> Point:
        wanted = {
            "phase": "decode",
            "planner": "moetis",
            "nic_gb_s": 45.0,
            "gpu_share": 1.0,
            "rows_per_rank": 2,
        } | wanted
        (found,) = [point for point in points if all(getattr(point, name) == value for name, value in wanted.items())]
        return found

    assert one(nic_gb_s=1.0).dispatch_s > one().dispatch_s
    assert one(gpu_share=0.5).miss_s > one().miss_s == 0
    assert one(gpu_share=0.5).expert_gb == pytest.approx(one().expert_gb / 2)
    assert one().node_kb_per_token < one(rows_per_rank=1).node_kb_per_token
    assert one(planner="moetis-routed").node_kb_per_token < one().node_kb_per_token


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=8))
@settings(max_examples=40)
def test_no_marked_point_is_beaten_and_every_other_one_is(figures: list[tuple[int, int, int]]) -> None:
    template = points_of_template()
    points = [
        replace(template, num_slots=slots, node_kb_per_token=float(traffic), step_imbalance=float(level))
        for slots, traffic, level in figures
    ]
    for point, mine in zip(mark_pareto(points), figures, strict=True):
        beaten = any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in figures)
        assert point.pareto == (not beaten)


def points_of_template() -> Point:
    values: dict[str, object] = dict.fromkeys(Point.__slots__, 1.0)
    return Point(**(values | {"phase": "decode", "planner": "eplb", "stand_in": False}))  # type: ignore[arg-type]


def test_groups_are_whole_nodes_that_divide_the_cluster() -> None:
    assert scale_out(load_topology("1250x8"), 256).group.num_ranks == 200
    assert scale_out(load_topology("1250x8"), 32).group.num_ranks == 16
    assert scale_out(load_topology("4x8"), 256).num_groups == 1
    assert scale_out(load_topology("2x4x8"), 256, 16).group.levels == ("switch", "node", "gpu")
    for wrong, said in ((12, "must divide the 32 GPUs"), (64, "must divide the 32 GPUs"), (0, "must divide")):
        with pytest.raises(ConfigError, match=said):
            scale_out(load_topology("4x8"), 256, wrong)
    with pytest.raises(ConfigError, match="more than the 1152"):
        scale_out(load_topology("1250x8"), 256, 10_000)
    levels = [{"name": "node"}, {"name": "gpu"}]
    uneven = topology_from_dict({"name": "odd", "levels": levels, "tree": [[0, 1], [2]]})
    assert scale_out(uneven, 8).num_groups == 1
    with pytest.raises(TopologyError, match="no equal groups"):
        scale_out(uneven, 8, 1)
    with pytest.raises(ConfigError, match="more than 0 GB/s"):
        with_nic(uneven, 0)


def test_layers_are_sampled_evenly_with_both_ends() -> None:
    trace = replace(make_trace(num_layers=9, num_tokens=10), layers=all_moe(9))
    sampled, layers = sample_layers(trace, 3)
    assert layers.tolist() == [0, 4, 8]
    assert (sampled.experts == trace.experts[:, [0, 4, 8]]).all()
    assert sample_layers(trace, 20)[0] is trace


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"times": (0.5,)}, "from 1 x experts upwards"),
        ({"times": ()}, "from 1 x experts upwards"),
        ({"planners": ("best",)}, "planner 'best'"),
        ({"decode_batches": (0,)}, "1 token a GPU"),
        ({"gpu_shares": (0.0,)}, "above 0"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(QUICK, **wrong)


def test_slots_never_exceed_an_expert_a_row_and_doubles_are_one() -> None:
    scale = scale_out(load_topology("2x2"), 8)
    assert rows_of(scale, 8, (1.0, 1.01, 2.0, 99.0)) == [2, 3, 4, 8]


def test_windows_hold_whole_requests_in_order_of_time() -> None:
    trace = make_trace(num_tokens=600, num_requests=30)
    trace = replace(trace, step=(1000 - trace.request).astype(np.int64))
    windows = cut_windows(trace, 3)
    assert sum(window.num_tokens for window in windows) == 600
    assert all(a.request.min() > b.request.max() for a, b in pairwise(windows))
    for number, said in ((1, "2 windows or more"), (31, "30 requests make no 31")):
        with pytest.raises((ConfigError, TraceError), match=said):
            cut_windows(trace, number)
    with pytest.raises(TraceError, match="no workloads"):
        cut_windows(trace, 3, by_workload=True)


def test_replanning_follows_a_load_that_moves_and_a_fixed_plan_does_not() -> None:
    first, second = make_trace(num_tokens=900, seed=1), make_trace(num_tokens=900, seed=2)
    second = replace(second, experts=((second.experts + 3) % 8).astype(np.uint8), request=second.request + 100)
    windows = cut_windows(first, 2) + cut_windows(second, 2)
    runs = list(drift(windows, load_topology("2x2"), 3, intervals=(0, 1), expert_bytes=10.0, effort=0.02))
    policies = {points[0].policy: points for points in runs}
    assert set(policies) == {
        *("one plan for ever", "a plan every window", "load re-levelled every window", "EPLB every window")
    }
    fixed, anew = policies["one plan for ever"], policies["a plan every window"]
    assert sum(point.copies for point in fixed) == 0 < sum(point.copies for point in anew)
    assert anew[0].nodes_visited == fixed[0].nodes_visited
    assert anew[-1].load_max_over_mean < fixed[-1].load_max_over_mean
    assert anew[-1].moved_bytes == 10.0 * anew[-1].copies
    with pytest.raises(ConfigError, match="every 1 window or more"):
        next(drift(windows, load_topology("2x2"), 3, intervals=(-1,), expert_bytes=1.0))


def test_screening_says_record_more_of_a_small_trace_and_no_on_one_node() -> None:
    small = screen(make_trace(num_tokens=300), load_topology("2x2"), SERVING)
    assert small.answer == UNSURE
    assert "record more" in small.reasons[0]
    uniform = make_trace(num_tokens=4000, num_requests=80, num_kinds=1)
    alone = screen(uniform, load_topology("1x4"), SERVING)
    assert alone.answer == NO
    assert "one node only" in alone.reasons[0]
    assert {gain.slots for gain in alone.gains} == {"none spare", "half as many again"}
    assert all(gain.between_nodes_share == 0 for gain in alone.gains)


def test_screening_of_traffic_with_kinds_on_slow_links_says_worth_it() -> None:
    trace = make_trace(num_tokens=6000, num_requests=600, num_experts=16, top_k=4, num_kinds=4)
    found = screen(trace, with_nic(load_topology("4x1"), 1.0), SERVING)
    assert found.answer.startswith("worth it")
    assert found.to_dict()["gains"][0]["interval"] is not None


def test_a_calibration_finds_the_numbers_behind_steps_that_the_model_made() -> None:
    trace, topology = make_trace(num_tokens=2000, num_experts=12, num_requests=40), load_topology("2x1")
    sizes = ModelSizes(token_bytes=100.0, expert_bytes=1000.0, pair_flops=10.0)
    homes = random_homes(trace.request, 2)
    counts = [
        count_steps(
            placement,
            topology,
            trace,
            homes,
            draw_steps(trace, phase_tokens(trace, DECODE), batch, 2000, np.random.default_rng(batch)),
            gpu_slots=3,
        )
        for placement in (linear_placement(2, 12, 2, 8), random_placement(2, 12, 2, 6))
        for batch in (1, 4, 16, 60)
    ]
    truth = replace(fit_costs(counts, np.concatenate([one.tokens * 1e-3 for one in counts])), read_s=3e-3, miss_s=9e-3)
    truth = replace(truth, pair_s=1e-4, vector_s=2e-4, way_s=5e-4)
    seconds = np.concatenate([predict(truth, one, topology, sizes) for one in counts])
    found = fit_costs(counts, seconds)
    again = np.concatenate([predict(found, one, topology, sizes) for one in counts])
    assert np.median(np.abs(again / seconds - 1)) < 0.02
    with pytest.raises(ConfigError, match="10 steps or more"):
        fit_costs(counts, np.zeros(3))
