"""The bench for several GPUs, tiny, on two processes over gloo: outputs stay the plain model's while experts move and
after a rank is killed."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from placement.core import ExpertId, Slot
from placement.migration import Move
from workers.parcels import parcels

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
PHASES = ("before", "during a move", "after, with replicas", "a rank killed")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    sys.path.insert(0, str(BENCH))
    try:
        from multigpu_crew import Job, run_crew
        from multigpu_stages import live_correctness

        job = Job(num_ranks=2, tiny=True, stages=("correctness",))
        return run_crew(functools.partial(live_correctness, 0), job)
    finally:
        sys.path.remove(str(BENCH))


def test_outputs_equal_the_plain_models_before_during_and_after_a_move_and_after_a_loss(
    rows: list[dict[str, Any]],
) -> None:
    assert [row["what"].partition(", ")[2] for row in rows] == list(PHASES)
    assert all(row["equal"] and row["tokens"] > 0 for row in rows)


def test_the_survivor_serves_every_expert(rows: list[dict[str, Any]]) -> None:
    assert rows[-1]["ranks"] == 1
    assert rows[-1]["experts_here"] == 2 * 8


def _move(number: int, source: int, target: int) -> Move:
    return Move(expert=ExpertId(0, number), source=Slot(source, 0), target=Slot(target, 0))


def test_parcels_hold_moves_of_one_direction_and_the_directions_take_turns() -> None:
    there = [_move(number, 0, 1) for number in range(3)]
    back = [_move(number, 1, 0) for number in range(3, 5)]
    elsewhere = _move(9, 2, 3)
    cut = parcels([*there, elsewhere, *back], 0, 2)
    assert cut == [tuple(there[:2]), tuple(back), (there[2],)]
    assert parcels([*there, elsewhere, *back], 1, 2) == cut
    assert parcels([elsewhere], 1, 2) == []
