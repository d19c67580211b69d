from __future__ import annotations

import re

import numpy as np
import pytest

from placement.core import ExpertId, Placement, Tier
from placement.errors import PlacementError


def _placement(table: list[list[int]], **more: object) -> Placement:
    return Placement(**{"epoch": 0, "num_ranks": 2, "num_experts": 3, "physical_to_logical": table} | more)  # type: ignore[arg-type]


def test_a_rank_holds_what_its_rows_say() -> None:
    placement = _placement([[0, 1, 2, 0], [2, -1, 1, 0]])
    assert placement.experts_on(0) == {ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 2)}
    assert placement.rows_per_rank == 2
    assert placement.copies_per_rank()[0].tolist() == [[1, 1, 0], [1, 0, 1]]


def test_slots_are_warm_unless_a_tier_is_given() -> None:
    assert (_placement([[0, 1, 2, 0]]).tiers == Tier.WARM).all()


def test_a_placement_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        _placement([[0, 1, 2, 0]]).physical_to_logical[0, 0] = 1


@pytest.mark.parametrize(
    ("table", "more", "said"),
    [
        ([[0, 1, 2, 3]], {}, "layer 0, slot 3: expert 3 is not in 0..2"),
        ([[0, 1, 2, -2]], {}, "layer 0, slot 3: expert -2 is not in 0..2"),
        ([[0, 0, 1, 2]], {}, "layer 0: expert 0 lies 2 times on rank 0"),
        ([[0, 1, 2, -1], [0, 1, -1, -1]], {}, "layer 1: expert 2 has no slot"),
        ([[0, 1, 2]], {}, "3 slots per layer do not divide by 2 ranks"),
        ([[0, 1]], {}, "3 experts need at least as many slots per layer, but there are 2"),
        ([[]], {}, "a table [layers, slots]"),
        ([[0, 1, 2, -1]], {"epoch": -1}, "epoch -1"),
        ([[0, 1, 2, -1]], {"num_ranks": 0}, "num_ranks 0"),
        ([[0, 1, 2, -1]], {"tiers": np.full((1, 4), 9)}, "tiers must be"),
        ([[0, 1, 2, -1]], {"tiers": np.zeros((1, 3))}, "tiers must be (1, 4)"),
    ],
)
def test_what_breaks_an_invariant_is_named(table: list[list[int]], more: dict[str, object], said: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(said)):
        _placement(table, **more)
