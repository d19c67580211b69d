"""What `moetis top` makes of two looks at a cluster."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cluster.top import Look, copied_share, rates_between
from cluster.top_view import look_to_dict, look_view
from placement.baselines import linear_placement
from placement.planfile import Plan
from placement.topology import load_topology
from workers.traffic import TrafficCounters
from workers.vitals import WorkerStatus

PLAN = Plan(
    placement=linear_placement(3, 8, 4, 2).with_epoch(5),
    topology=load_topology("2x2"),
    measured={"after": {"nodes_visited": 0.5}},
)


def _status(rank: int, scale: int = 1, **changes: Any) -> WorkerStatus:
    """Rank r has computed r + 1 hundred pairs."""
    status = WorkerStatus(
        rank=rank,
        epoch=5,
        alive=True,
        error=None,
        steps=10 * scale,
        experts=6,
        host_slab_bytes=10**6,
        slot_bytes=10**6,
        cache={"lookups": 10 * scale, "hits": 4 * scale},
        recorder={},
        traffic={"tokens": 30 * scale, "nodes_visited": 15, "ranks_visited": 60, "pairs": 100 * (rank + 1) * scale},
    )
    return replace(status, **changes)


def _look(at: float = 0.0, scale: int = 1, progress: str = "idle", **changes: Any) -> Look:
    ranks = tuple(_status(rank, scale, **changes) for rank in range(4))
    return Look(at=at, plan=PLAN, progress=progress, ranks=ranks)


def _text(now: Look) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(look_view("demo", now, rates_between(now, None)))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_first_look_counts_from_the_start() -> None:
    rates = rates_between(_look(), None)
    assert (rates.seconds, rates.tokens_per_s) == (None, None)
    assert (rates.nodes_visited, rates.ranks_visited) == (0.5, 2.0)
    assert rates.load == pytest.approx((0.4, 0.8, 1.2, 1.6))
    assert rates.load_max_over_mean == pytest.approx(1.6)
    assert rates.total_hit_rate == pytest.approx(0.4)


def test_later_looks_count_from_the_one_before() -> None:
    rates = rates_between(_look(at=4.0, scale=3), _look(at=2.0))
    assert rates.seconds == 2.0
    # 4 ranks x 60 tokens and layers more, 3 layers, 2 seconds.
    assert rates.tokens_per_s == 40
    assert rates.steps_per_s == 10
    assert rates.nodes_visited == 0


def test_a_rank_that_was_started_again_counts_from_nothing() -> None:
    rates = rates_between(_look(at=2.0, scale=1), _look(at=0.0, scale=5))
    assert rates.tokens_per_s == 20


def test_a_cluster_without_traffic_has_no_rates() -> None:
    now = _look()
    rates = rates_between(now, now)
    assert (rates.nodes_visited, rates.total_hit_rate, rates.load_max_over_mean) == (None, None, None)
    assert look_to_dict("demo", now, rates)["ranks"][0]["load_over_mean"] is None


@pytest.mark.parametrize(
    ("progress", "share"), [("copying round 1 of 4", 0.0), ("copying round 3 of 4", 0.5), ("planning", None)]
)
def test_the_share_of_rounds_copied_is_read_from_the_progress(progress: str, share: float | None) -> None:
    assert copied_share(progress) == share


def test_the_view_has_a_row_a_rank_and_says_what_the_plan_promised() -> None:
    text = _text(_look(progress="copying round 3 of 4"))
    assert "demo  epoch 5  4 ranks in 2 nodes (2x2)" in text
    assert "(the plan said 0.50 nodes)" in " ".join(text.split())
    assert "████████░░░░░░░░ copying round 3 of 4" in text
    assert text.count("serving") == 4


def test_ranks_that_go_on_without_one_keep_their_numbers() -> None:
    plan = replace(PLAN, placement=linear_placement(3, 8, 3, 3), topology=load_topology("3x1"))
    now = Look(at=0.0, plan=plan, progress="idle", ranks=tuple(_status(rank) for rank in (0, 2, 3)))
    found = look_to_dict("demo", now, rates_between(now, None))["ranks"]
    assert [(rank["rank"], rank["node"]) for rank in found] == [(0, 0), (2, 1), (3, 2)]


def test_the_view_says_what_is_wrong() -> None:
    text = _text(_look(alive=False, error="[bold]out of memory"))
    assert "rank 0: [bold]out of memory" in text
    assert text.count("stopped") == 4
    silent = Look(at=0.0, plan=PLAN, progress="idle", ranks=(), problem="a rank does not answer")
    assert "a rank does not answer" in _text(silent)


def test_a_token_visits_each_other_node_and_rank_once() -> None:
    import numpy as np

    counters = TrafficCounters()
    node_of_rank = np.array([0, 0, 1, 1], np.int32)
    counters.count_sent(np.array([[0, 0, 1], [3, 2, 3], [2, 0, 1]], np.int32), 0, node_of_rank)
    assert (counters.tokens, counters.nodes_visited, counters.ranks_visited) == (3, 2, 5)
    counters.count_sent(np.zeros((0, 3), np.int32), 0, node_of_rank)
    assert counters.tokens == 3
