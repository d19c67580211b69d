from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from placement.baselines import linear_placement
from placement.core import Placement
from placement.counts import Counts
from placement.errors import PlacementError, TraceError
from placement.evaluate import replay
from placement.homes import homes_of
from placement.plan import make_plan
from placement.planfile import Plan
from placement.report import LiveFigure, Sizes, make_counts_report, make_report, render_html, report_to_json
from placement.topology import load_topology
from placement.trace import RoutingTrace

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def _trace(layers: int = 2, experts: int = 8, top_k: int = 2, requests: int = 8, **more: Any) -> RoutingTrace:
    rng = np.random.default_rng(0)
    num_tokens = 20 * requests
    values: dict[str, Any] = {
        "num_experts": experts,
        "experts": rng.random((num_tokens, layers, experts)).argsort(axis=2)[:, :, :top_k].astype(np.uint8),
        "request": np.repeat(np.arange(requests), 20).astype(np.int64),
        "position": np.tile(np.arange(20), requests).astype(np.int32),
        "step": np.zeros(num_tokens, np.int64),
        "source_rank": np.full(num_tokens, -1, np.int32),
        "phase": np.zeros(num_tokens, np.uint8),
    }
    return RoutingTrace(**values | more)


@pytest.fixture(scope="module")
def plan() -> Plan:
    current = linear_placement(2, 8, 4, 3)
    return make_plan(_trace(), load_topology("2x2"), rows_per_rank=3, current=current)


class Scripts(HTMLParser):
    """Collects the scripts, the event handlers and the visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers: list[str] = []
        self.text = ""
        self._skip = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self._skip = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skip = False

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.text += data


def test_the_page_says_the_verdict_and_what_it_rests_on(plan: Plan) -> None:
    ratio = {"ratio": 0.75, "low": 0.7, "high": 0.8, "num_tokens": 800, "num_requests": 40}
    measured = plan.measured | {
        "before": plan.measured["before"] | {"nodes_visited": 2.0, "load_max_over_mean": 1.4},
        "after": plan.measured["after"] | {"nodes_visited": 1.5, "load_max_over_mean": 1.1, "p99_s": 0.125},
        "trust": {"after_over_before": ratio},
    }
    text = Scripts(render_html(make_report(replace(plan, measured=measured), _trace()))).text
    assert "Apply: on requests that the plan has not seen, 2.00 to 1.50 other nodes per token and layer (-25%," in text
    assert "Fitted on 80 tokens of 4 requests; judged on 80 tokens of 4 other requests." in text
    assert "homes are random" in text
    assert "plan over before0.750-25%0.700 to 0.80040" in text
    assert "p99 (s)0.125" in text


def test_a_plan_that_saves_nothing_is_to_be_left(plan: Plan) -> None:
    measured = plan.measured | {"after": plan.measured["before"]}
    assert "Leave it" in Scripts(render_html(make_report(replace(plan, measured=measured), _trace()))).text


def test_a_plan_with_wrong_figures_is_refused_by_the_key(plan: Plan) -> None:
    with pytest.raises(PlacementError, match=r"measured\.after\.nodes_visited"):
        make_report(replace(plan, measured={"after": {"nodes_visited": "few"}}), _trace())


def test_a_plan_without_figures_gets_no_verdict(plan: Plan) -> None:
    text = Scripts(render_html(make_report(replace(plan, measured={}), _trace()))).text
    assert "No verdict" in text


def test_the_migration_and_the_live_figures_are_on_the_page(plan: Plan) -> None:
    live = (LiveFigure(name="cache hit rate", before=0.4, after=0.5, unit="%"),)
    report = make_report(
        plan, _trace(), before=linear_placement(2, 8, 4, 3), live=live, sizes=Sizes(expert_bytes=10**6)
    )
    text = Scripts(render_html(report)).text
    assert sum(step.moves for step in report.rounds) > 0
    assert "experts are copied" in text
    assert "cache hit rate40.0 %50.0 %" in text


def test_names_from_outside_can_not_run_script(plan: Plan) -> None:
    plain = Scripts(render_html(make_report(plan, _trace())))
    trace = _trace(model=HOSTILE, workload_names=(HOSTILE,), workload=np.zeros(160, np.uint8))
    topology = replace(plan.topology, name=HOSTILE, levels=("node", HOSTILE))
    measured = plan.measured | {
        "says": HOSTILE,
        "after": plan.measured["after"] | {HOSTILE: 1.0},
        "trust": {HOSTILE: {"ratio": 1, "low": 1, "high": 1}},
    }
    live = (LiveFigure(name=HOSTILE, before=None, after=1.0, unit=HOSTILE),)
    page = render_html(
        make_report(replace(plan, topology=topology, measured=measured), trace, live=live, title=HOSTILE)
    )
    found = Scripts(page)
    assert found.scripts == plain.scripts
    assert found.handlers == []
    assert HOSTILE in found.text


def test_the_page_needs_nothing_from_outside_and_stays_small(plan: Plan) -> None:
    page = render_html(make_report(plan, _trace()))
    assert len(page) < 6_000_000
    assert re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="[^"]+"', page) == []


def test_58_layers_of_256_experts_stay_under_6_megabytes() -> None:
    trace = _trace(layers=58, experts=256, top_k=8, requests=2)
    before = linear_placement(58, 256, 8, 36)
    table = np.roll(before.physical_to_logical.reshape(58, 8, 36), 1, axis=1).reshape(58, -1)
    after = replace(before, epoch=1, physical_to_logical=table)
    plan = Plan(placement=after, topology=load_topology("2x4"), measured={})
    page = render_html(make_report(plan, trace, before=before, sizes=Sizes(expert_bytes=44_000_000)))
    assert len(page.encode()) < 6_000_000
    assert "the 8 busiest experts of each layer" in page
    assert "4 of 58 layers are shown: 0, 19, 38, 57." in page


def test_many_ranks_are_drawn_and_listed_in_part() -> None:
    topology = load_topology("4x100x2")
    plan = Plan(placement=linear_placement(1, 8, 800, 1), topology=topology, measured={})
    page = render_html(make_report(plan, _trace(layers=1)))
    text = Scripts(page).text
    assert "The first 32 of 800 ranks are drawn." in text
    assert "the busiest 256 of 800 ranks" in text
    assert page.count("<line ") == 1 + 16 + 32


def test_one_rank_with_one_layer_and_one_expert_has_a_page() -> None:
    placement = Placement(epoch=0, num_ranks=1, num_experts=1, physical_to_logical=[[0]])
    plan = Plan(placement=placement, topology=load_topology("1x1"), measured={})
    trace = _trace(layers=1, experts=1, top_k=1)
    assert "<h1>" in render_html(make_report(plan, trace))


def test_a_trace_of_another_model_is_refused(plan: Plan) -> None:
    with pytest.raises(TraceError, match="another model"):
        make_report(plan, _trace(layers=3))


def test_visits_and_load_are_those_of_a_replay(plan: Plan) -> None:
    trace = _trace()
    homes = homes_of(trace, 4)
    counts = replay(plan.placement, plan.topology, trace, homes)
    traffic = make_report(plan, trace).traffic_after
    visits = [counts.nodes.sum() / (160 * 2), counts.ranks.sum() / (160 * 2)]
    assert [traffic.visited(0), traffic.visited(1)] == pytest.approx(visits)
    load = counts.load.sum(axis=(0, 1))
    assert traffic.load == pytest.approx(load / load.mean())


def test_charts_have_a_label_and_tables_row_headers(plan: Plan) -> None:
    page = render_html(make_report(plan, _trace(), before=linear_placement(2, 8, 4, 3)))
    assert (
        page.count('role="application" aria-roledescription="chart" aria-label="') == page.count('class="chart"') == 9
    )
    assert page.count('role="img" aria-label="') == 2
    assert "<tr><td>" not in page
    assert page.count("as a table</summary><div") == 7


def test_the_hint_stands_above_its_chart(plan: Plan) -> None:
    page = render_html(make_report(plan, _trace()))
    assert 0 < page.index("Shorter is better") < page.index("bar chart: nodes and ranks visited")


def test_hidden_states_on_links_are_one_a_node_and_one_a_further_rank_inside(plan: Plan) -> None:
    report = make_report(plan, _trace(), sizes=Sizes(token_bytes=10))
    traffic = report.traffic_after
    assert traffic.vectors.tolist() == pytest.approx([traffic.visited(0), traffic.visited(1) - traffic.visited(0)])
    assert traffic.bytes_per_token(0, 10) == pytest.approx(2 * 2 * 10 * traffic.visited(0))
    assert "bytes per token, plan" in Scripts(render_html(report)).text


def test_counts_alone_have_a_page_of_load_and_memory_and_moves() -> None:
    placement = linear_placement(2, 8, 4, 3)
    after = replace(placement, epoch=1, physical_to_logical=placement.physical_to_logical[:, ::-1])
    measured = {name: {"load_max_over_mean": load} for name, load in (("before", 1.5), ("after", 1.1))}
    plan = Plan(placement=after, topology=load_topology("2x2"), measured=measured)
    counts = Counts(load=np.vstack([np.arange(8.0), np.zeros(8)]), source="counts 'c.npz': key 'counts'")
    report = make_counts_report(plan, counts, before=placement)
    text = Scripts(render_html(report)).text
    assert "Apply: hops are not known, and it levels the load; on the counts that it was made from" in text
    assert "The charts of experts and ranks show counts 'c.npz'" in text
    assert "experts are copied" in text
    assert "Topology and traffic" not in text
    found = json.loads(report_to_json(report))
    assert (found["cache"], found["activation"], found["traffic"]["after"]["levels"]) == (None, None, [])


def test_a_plan_that_does_not_follow_on_lists_no_moves(plan: Plan) -> None:
    before = replace(linear_placement(2, 8, 4, 3), epoch=7)
    text = Scripts(render_html(make_report(plan, _trace(), before=before))).text
    assert "The present placement has epoch 7, the plan 1" in text


def test_the_json_has_the_numbers_of_the_page(plan: Plan) -> None:
    live = (LiveFigure(name="speed", before=None, after=float("nan"), unit="1/s"),)
    report = make_report(
        plan, _trace(), before=linear_placement(2, 8, 4, 3), live=live, sizes=Sizes(expert_bytes=10**6)
    )
    found = json.loads(report_to_json(report))
    assert found["measured"]["held_out"] == {"tokens": 80, "requests": 4}
    assert found["measured"]["scores"]["after"]["nodes_visited"] == plan.measured["after"]["nodes_visited"]
    assert found["verdict"]["decision"] in ("apply", "not sure", "leave")
    assert np.shape(found["expert_load"]) == (2, 8)
    assert [level["name"] for level in found["traffic"]["before"]["levels"]] == ["node", "gpu"]
    assert sum(step["num_bytes"] for step in found["rounds"]) > 0
    assert found["live"] == [{"name": "speed", "before": None, "after": None, "unit": "1/s"}]
