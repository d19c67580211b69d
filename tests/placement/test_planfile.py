from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from placement.core import Placement
from placement.errors import PlacementError
from placement.files import write_whole
from placement.planfile import Plan, load_plan, plan_from_json, plan_to_json
from placement.topology import load_topology


def _plan() -> Plan:
    placement = Placement(epoch=3, num_ranks=4, num_experts=4, physical_to_logical=[[0, 1, 2, 3], [3, 2, 1, 0]])
    return Plan(placement=placement, topology=load_topology("2x2"), measured={"gain": 0.25})


def test_a_plan_is_written_and_read_back() -> None:
    plan = plan_from_json(plan_to_json(_plan()), source="p")
    assert plan.placement.physical_to_logical.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert plan.placement.epoch == 3
    assert plan.topology.to_dict() == _plan().topology.to_dict()
    assert plan.measured == {"gain": 0.25}


def test_a_plan_file_has_the_keys_that_others_read() -> None:
    raw = json.loads(plan_to_json(_plan()))
    assert set(raw) == {
        "format",
        "epoch",
        "num_ranks",
        "num_experts",
        "topology",
        "physical_to_logical",
        "tiers",
        "rank_weights",
        "measured",
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "moetis-plan/9"}, "key 'format' must be 'moetis-plan/1'"),
        ({"epoch": "3"}, "key 'epoch': Input should be a valid integer"),
        ({"epoch": True}, "key 'epoch'"),
        ({"epoch": 10**40}, "key 'epoch'"),
        ({"num_experts": 10**12}, "1000000000000 experts need at least as many slots per layer, but there are 4"),
        ({"extra": 1}, "key 'extra': Extra inputs"),
        ({"num_ranks": 3}, "do not divide by 3 ranks"),
        ({"num_ranks": 2, "rank_weights": [[1, 1], [1, 1]]}, "topology '2x2' has 4"),
        ({"rank_weights": [[1, 1, 1, 1]]}, "rank_weights must be (2, 4) values from 1 to 65535"),
        ({"rank_weights": [[1, 1, 1, 0], [1, 1, 1, 1]]}, "rank_weights must be (2, 4) values from 1 to 65535"),
        ({"rank_weights": [[1, 1, 1, 65536], [1, 1, 1, 1]]}, "a value does not fit"),
        ({"rank_weights": [[1, 1], [1]]}, "'rank_weights' must be a table"),
        ({"physical_to_logical": [[0, 1, 2, 3], [3, 2, 1]]}, "must be tables of one shape"),
        ({"physical_to_logical": [[0, 1, 2, 10**12], [3, 2, 1, 0]]}, "a value does not fit"),
        ({"physical_to_logical": [[0, 1, 2, 1.5], [3, 2, 1, 0]]}, "key 'physical_to_logical.0.3'"),
        ({"physical_to_logical": [[0, 1, 2, 2], [3, 2, 1, 0]]}, "layer 0: expert 3 has no slot"),
        ({"physical_to_logical": []}, "must be tables of one shape"),
        ({"tiers": [[0, 0, 0, -1], [0, 0, 0, 0]]}, "a value does not fit"),
        ({"topology": {}}, "key 'topology'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    text = json.dumps(json.loads(plan_to_json(_plan())) | changes)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        plan_from_json(text, source="plan 'p.json'")
    assert "p.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "[" * 100_000])
def test_what_is_no_plan_at_all_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PlacementError, match=r"p\.json"):
        load_plan(tmp_path / "p.json")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "a", b"x")
    assert [item.name for item in tmp_path.iterdir()] == ["a"]
