"""Assessments of placements, their intervals, and the sizes of models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placement.baselines import linear_placement
from placement.comparing import Serving, assess
from placement.costs import ModelSizes
from placement.errors import ConfigError
from placement.homes import random_homes
from placement.intervals import jackknife, random_groups
from placement.modelsizes import choose_sizes, read_sizes
from placement.plan import plan_placement
from placement.topology import load_topology
from tests.placement.planner_cases import make_trace

SERVING = Serving(sizes=ModelSizes(), decode_batch=50, prefill_batch=100)


def test_the_jackknife_of_a_mean_is_the_textbook_interval() -> None:
    values = np.random.default_rng(0).normal(5.0, 1.0, 40)
    low, high = jackknife(np.stack([values, np.ones(40)], axis=1), lambda parts: float(parts[0] / parts[1])) or (0, 0)
    half = 2.0227 * values.std(ddof=1) / np.sqrt(40)
    assert (high - low) / 2 == pytest.approx(half, rel=1e-4)
    assert random_groups(float(values.mean()), values) == pytest.approx((low, high), rel=1e-6)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        low, high = random_groups(*_drawn(rng)) or (1.0, 0.0)
        covered += low <= 3.0 <= high
    assert 0.90 <= covered / 300 <= 0.99


def _drawn(rng: np.random.Generator) -> tuple[float, np.ndarray]:
    groups = rng.exponential(3.0, (8, 20)).mean(axis=1)
    return float(groups.mean()), groups


def test_one_request_gives_no_interval() -> None:
    assert jackknife(np.ones((1, 2)), float) is None
    trace = make_trace(num_requests=1)
    topology = load_topology("2x2")
    found = assess(linear_placement(2, 8, 4, 2), topology, trace, random_homes(trace.request, 4), SERVING)
    assert found.intervals["nodes_visited"] is None
    assert found.phases["decode"].interval("mean_s") is None


def test_a_better_plan_shows_in_visits_bytes_and_step_time() -> None:
    fit, judged = make_trace(num_tokens=4000, num_requests=800).split_by_request()
    topology = load_topology("2x2")
    homes = random_homes(judged.request, 4)
    linear = assess(linear_placement(2, 8, 4, 2), topology, judged, homes, SERVING)
    better = assess(plan_placement(fit, topology, rows_per_rank=2, effort=0.1), topology, judged, homes, SERVING)
    ratio = better.over(linear)
    assert ratio["nodes_visited"] < ratio["nodes_visited_interval"][1] < 1
    assert ratio["decode_step"]["interval"][0] < ratio["decode_step"]["ratio"] < ratio["decode_step"]["interval"][1]
    for phase in ("decode", "prefill"):
        mine, theirs = better.phases[phase].cost, linear.phases[phase].cost
        assert mine.bytes_per_token["node"] < theirs.bytes_per_token["node"]
        assert mine.mean_s == pytest.approx(mine.compute_s + mine.miss_s + mine.dispatch_s + mine.combine_s)
        assert mine.step_imbalance <= mine.step_imbalance_p99
    assert json.loads(json.dumps(better.to_dict()))["decode"]["tokens_per_step"] == 50


def test_fewer_experts_on_the_gpu_miss_more_and_cost_time() -> None:
    trace, topology = make_trace(), load_topology("2x2")
    homes = random_homes(trace.request, 4)
    costs = [
        assess(linear_placement(2, 8, 4, 2), topology, trace, homes, replace(SERVING, gpu_share=share))
        .phases["decode"]
        .cost
        for share in (1.0, 0.5)
    ]
    assert (costs[0].hit_rate, costs[0].miss_s) == (1.0, 0.0)
    assert costs[1].hit_rate < 1 and costs[1].miss_s > 0


@pytest.mark.parametrize(
    "wrong", [{"decode_batch": 0}, {"gpu_share": 0.0}, {"gpu_share": 1.5}, {"gpu_share": float("nan")}]
)
def test_serving_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="batches must be 1 token or more"):
        replace(SERVING, **wrong)


def test_sizes_come_from_a_name_a_config_or_the_traces_shape(tmp_path: Path) -> None:
    trace = make_trace()
    assert choose_sizes("mixtral-8x7b", trace).sizes.expert_bytes == pytest.approx(352e6, rel=0.01)
    assert "for want of a better guess" in choose_sizes(None, trace).origin
    shaped = make_trace(num_tokens=10, num_layers=24, num_experts=32, top_k=4)
    assert choose_sizes(None, shaped).sizes.token_bytes == 5760
    config = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 512, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = choose_sizes(str(tmp_path), trace).sizes
    assert (sizes.expert_bytes, sizes.pair_flops, sizes.token_bytes) == (3 * 128 * 64 * 4, 6 * 128 * 64, 256)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "neither a readable config.json"),
        ("[1]", "must be a JSON object"),
        ('{"hidden_size": "x"}', "key 'hidden_size' must be a whole number"),
        ('{"hidden_size": 8, "intermediate_size": 4, "dtype": "int3"}', "key 'dtype'"),
        (
            '{"hidden_size": 8, "intermediate_size": 4, "quantization_config": {"quant_method": "magic"}}',
            "quantization_config.quant_method",
        ),
    ],
)
def test_a_config_that_is_none_is_refused_by_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_sizes(file)
