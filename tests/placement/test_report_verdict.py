from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlacementError
from placement.report.measured import read_measured
from placement.report.numbers import human_bytes, number_ranges, percent, quantity, seconds, tick_step
from placement.report.partly import Part
from placement.report.verdict import Decision, judge

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KNOWN_KEYS = ["fit", "held_out", "trust", "says", "before", "after", "eplb", "after_routed_homes"]


def _measured(
    hops: tuple[float, float], load: tuple[float, float], trust: tuple[float, float] | None, requests: int = 40
) -> dict[str, Any]:
    measured: dict[str, Any] = {
        name: {"nodes_visited": hops[i], "load_max_over_mean": load[i]} for i, name in enumerate(("before", "after"))
    }
    if trust is not None:
        ratio = {"ratio": hops[1] / hops[0], "low": trust[0], "high": trust[1], "num_requests": requests}
        measured["trust"] = {"after_over_before": ratio}
    return measured


def _judge(*case: Any, requests: int = 40) -> tuple[Decision, str]:
    verdict = judge(read_measured(_measured(*case, requests=requests)))
    return verdict.decision, verdict.text


def test_a_gain_whose_whole_interval_is_a_gain_is_applied() -> None:
    decision, text = _judge((2.0, 1.5), (1.4, 1.1), (0.7, 0.8))
    assert decision is Decision.APPLY
    assert "2.00 to 1.50 other nodes per token and layer (-25%, 95% interval -30% to -20%)" in text
    assert "Load max/mean 1.40 to 1.10 (-21%)." in text


@pytest.mark.parametrize(
    ("hops", "load", "trust", "decision", "why"),
    [
        ((2.0, 1.9), (1.4, 1.1), (0.9, 1.01), Decision.LEAVE, "within what chance could do"),
        ((2.0, 1.5), (1.4, 1.1), None, Decision.LEAVE, "does not say how far its figures can be trusted"),
        ((2.0, 1.98), (1.4, 1.4), (0.985, 0.995), Decision.LEAVE, "below 2%"),
        ((2.0, 1.8), (1.1, 1.5), (0.88, 0.92), Decision.LEAVE, "grows by more than the hops shrink"),
        ((2.0, 2.0), (1.1, 1.1), (1.0, 1.0), Decision.LEAVE, "it saves no hops"),
        ((2.0, 2.1), (1.1, 1.1), (0.9, 1.2), Decision.LEAVE, "it saves no hops"),
        ((2.0, 2.0), (1.5, 1.1), (1.0, 1.0), Decision.APPLY, "it levels the load"),
    ],
)
def test_a_gain_that_is_unsure_small_or_dear_is_not_applied(
    hops: Any, load: Any, trust: Any, decision: Decision, why: str
) -> None:
    found, text = _judge(hops, load, trust)
    assert (found, why in text) == (decision, True), text


def test_an_interval_over_very_few_requests_is_not_believed() -> None:
    assert _judge((2.0, 1.5), (1.4, 1.1), (0.7, 0.8), requests=4)[0] is Decision.LEAVE


def test_a_part_that_brings_nearly_all_is_what_is_to_be_applied() -> None:
    part = Part(layers=(0, 1, 2, 7), saving=0.95, copies=0.3)
    verdict = judge(read_measured(_measured((2.0, 1.5), (1.4, 1.1), (0.7, 0.8))), part)
    assert verdict.decision is Decision.PARTLY
    assert verdict.text.startswith("Apply partly: layers 0-2, 7 bring 95% of the saving for 30% of the copies")


def test_a_part_of_a_plan_that_does_not_pay_is_left_too() -> None:
    part = Part(layers=(0,), saving=0.95, copies=0.3)
    assert judge(read_measured(_measured((2.0, 1.9), (1.4, 1.1), (0.9, 1.01))), part).decision is Decision.LEAVE


def test_worse_balance_beside_fewer_hops_is_said() -> None:
    decision, text = _judge((2.0, 1.2), (1.13, 1.2), (0.55, 0.65))
    assert decision is Decision.APPLY
    assert "Load balance gets worse while hops get fewer: load max/mean 1.13 to 1.20 (+6.2%)" in text


def test_one_node_is_judged_by_its_load() -> None:
    figures = {"nodes_visited": 0.0, "load_max_over_mean": 1.5}
    level = {"before": figures, "after": figures | {"load_max_over_mean": 1.1}}
    assert judge(read_measured(level)).decision is Decision.APPLY
    assert judge(read_measured({"before": figures, "after": figures})).decision is Decision.LEAVE
    worse = {"before": figures, "after": figures | {"nodes_visited": 0.1}}
    assert "adds hops where there were none" in judge(read_measured(worse)).text


def test_figures_of_one_placement_alone_give_no_verdict() -> None:
    assert judge(read_measured({"after": {"nodes_visited": 1.0}})).decision is Decision.NONE


@pytest.mark.parametrize(
    ("measured", "key"),
    [
        ({"after": {"nodes_visited": "many"}}, "measured.after.nodes_visited"),
        ({"before": {"load_max_over_mean": float("nan")}}, "measured.before.load_max_over_mean"),
        ({"before": {"nodes_visited": True}}, "measured.before.nodes_visited"),
        ({"before": {"nodes_visited": -1}}, "measured.before.nodes_visited"),
        ({"trust": {"after_over_before": {"low": []}}}, "measured.trust.after_over_before.low"),
        ({"fit": {"tokens": 1.5}}, "measured.fit.tokens"),
        ({"says": 5}, "measured.says"),
        ({"eplb": {"ranks_visited": 10**400}}, "measured.eplb.ranks_visited"),
    ],
)
def test_a_wrong_value_under_a_known_key_is_named(measured: dict[str, Any], key: str) -> None:
    with pytest.raises(PlacementError, match=f"key '{key}'"):
        read_measured(measured)


def test_a_number_where_figures_should_be_is_no_mapping() -> None:
    with pytest.raises(PlacementError, match=r"key 'measured\.after': Input should be a mapping \(got '3'\)"):
        read_measured({"after": 3})


@pytest.mark.parametrize("value", [None, {}])
@pytest.mark.parametrize("key", KNOWN_KEYS)
def test_null_and_missing_figures_are_not_known(key: str, value: Any) -> None:
    measured = _measured((2.0, 1.5), (1.4, 1.1), (0.7, 0.8)) | {key: value if key != "says" else None}
    judge(read_measured(measured))


@given(st.dictionaries(st.sampled_from(KNOWN_KEYS) | st.text(max_size=5), JSON_VALUES, max_size=5))
def test_any_json_is_read_or_refused(measured: dict[str, Any]) -> None:
    try:
        judge(read_measured(measured))
    except PlacementError as error:
        assert "measured" in str(error)


def test_numbers_beyond_the_known_figures_are_kept() -> None:
    extra = {
        "nodes_visited": 1,
        "p99_s": 0.25,
        "step": {"num_steps": 7, "note": "x"},
        "note": "free",
        "flag": True,
        "huge": 10**400,
    }
    assert read_measured({"after": extra}).scores["after"] == {
        "nodes_visited": 1.0,
        "p99_s": 0.25,
        "step num_steps": 7,
    }


def test_numbers_are_for_people() -> None:
    assert [human_bytes(size) for size in (0, 999, 999_999, 34_500_000, 7e9)] == [
        "0 B",
        "999 B",
        "1 MB",
        "34.5 MB",
        "7 GB",
    ]
    assert [percent(share) for share in (-0.0, -0.0004, -0.025, -0.0999, 0.25)] == ["0%", "0%", "-2.5%", "-10%", "+25%"]
    assert quantity(-0.0001, "%") == "0.0 %"
    assert quantity(float("nan"), "1/s") == "not known"
    assert quantity(3_400_000, "bytes") == "3.4 MB"


def test_ticks_are_thinned_to_what_fits() -> None:
    assert [tick_step(count, 20) for count in (1, 20, 24, 58, 256, 10_000)] == [1, 1, 2, 5, 20, 500]


def test_numbers_in_a_row_are_drawn_together() -> None:
    assert number_ranges((0, 1, 2, 7, 9, 10)) == "0-2, 7, 9-10"
    assert number_ranges(()) == ""


def test_seconds_have_a_unit_that_fits() -> None:
    assert [seconds(value) for value in (3e-6, 0.0015, 2.5, 200)] == ["3 us", "1.5 ms", "2.5 s", "3.33 min"]
