"""What the watch makes of signs of life."""

from __future__ import annotations

from cluster.watch import judge
from workers.vitals import Pulse


def _pulse(waiting: bool = True, still_s: float = 0.1, serving: bool = True, error: str | None = None) -> Pulse:
    return Pulse(epoch=1, serving=serving, waiting=waiting, still_s=still_s, error=error, write_errors=0)


def test_ranks_that_move_are_in_order() -> None:
    assert judge({0: _pulse(), 1: _pulse(waiting=False)}, 30) == ({}, None)


def test_the_rank_that_the_others_wait_for_is_the_one_that_hangs() -> None:
    hung, why = judge({0: _pulse(still_s=40), 1: _pulse(waiting=False, still_s=40), 2: _pulse(still_s=40)}, 30)
    assert list(hung) == [1]
    assert "40 s" in (why or "")


def test_an_engine_that_stopped_has_all_part_and_blames_nobody() -> None:
    assert judge({0: _pulse(), 1: _pulse(serving=False, error="layer 3: no memory")}, 30) == ({}, "layer 3: no memory")


def test_ranks_that_all_wait_for_each_other_part() -> None:
    hung, why = judge({0: _pulse(still_s=40), 1: _pulse(still_s=41)}, 30)
    assert hung == {}
    assert "waited for each other" in (why or "")


def test_nobody_there_is_no_news() -> None:
    assert judge({}, 30) == ({}, None)


def test_ranks_that_are_all_slow_are_left_alone() -> None:
    assert judge({0: _pulse(waiting=False, still_s=40), 1: _pulse(waiting=False, still_s=40)}, 30) == ({}, None)
