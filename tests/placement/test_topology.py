from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import TopologyError
from placement.topology import load_topology, topology_from_dict

TWO_LEVELS = [{"name": "node"}, {"name": "gpu"}]


def test_nodes_times_gpus_is_a_topology() -> None:
    topology = load_topology("2x3")
    assert topology.node_of_rank().tolist() == [0, 0, 0, 1, 1, 1]
    assert (topology.num_ranks, topology.num_nodes, topology.levels) == (6, 2, ("node", "gpu"))


def test_four_numbers_are_switches_nodes_numa_domains_and_gpus() -> None:
    topology = load_topology("2x2x2x1")
    assert topology.levels == ("switch", "node", "numa", "gpu")
    assert topology.groups[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs" / "topology").glob("*.yaml")))
def test_the_shipped_topologies_load(path: Path) -> None:
    assert load_topology(str(path)).num_ranks > 1


def test_units_of_the_file_become_bytes_and_seconds() -> None:
    level = {"name": "node", "bandwidth_gb_s": 45.0, "latency_us": 15.0}
    topology = topology_from_dict({"name": "x", "levels": [level, {"name": "gpu"}], "fanout": [1, 1]})
    assert topology.links[0].bandwidth == 45e9
    assert topology.links[0].latency_s == pytest.approx(15e-6)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_an_uneven_tree_is_written_and_read_back(sizes: list[int]) -> None:
    first = np.concatenate([[0], np.cumsum(sizes)])
    tree = [list(range(first[i], first[i + 1])) for i in range(len(sizes))]
    topology = topology_from_dict({"name": "odd", "levels": TWO_LEVELS, "tree": tree})
    again = topology_from_dict(topology.to_dict())
    assert again.groups.tolist() == topology.groups.tolist()
    assert again.links == topology.links
    assert again.device == topology.device
    assert np.bincount(topology.node_of_rank()).tolist() == sizes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fanout": [2]}, "key 'fanout': needs 2 numbers"),
        ({"fanout": [2, 0]}, "key 'fanout'"),
        ({"fanout": [2, True]}, "key 'fanout.1'"),
        ({"fanout": [10**12, 10**12]}, "key 'fanout': [1000000000000, 1000000000000] makes"),
        ({"fanout": None, "tree": [[0, 2]]}, "key 'tree': expected rank 1, got 2"),
        ({"fanout": None, "tree": [[0, True]]}, "expected rank 1, got True"),
        ({"fanout": None, "tree": [0, 1]}, "key 'tree'"),
        ({"fanout": None, "tree": [[]]}, "key 'tree'"),
        ({"fanout": None, "tree": []}, "key 'tree'"),
        ({"fanout": None}, "give exactly one of 'tree'"),
        ({"tree": [[0]]}, "give exactly one of 'tree'"),
        ({"levels": [{"name": "rack"}, {"name": "gpu"}]}, "must include 'node'"),
        ({"levels": []}, "key 'levels'"),
        ({"levels": [{"name": "node", "bandwidth_gb_s": -1.0}, {"name": "gpu"}]}, "key 'levels.0.bandwidth_gb_s'"),
        ({"levels": [{"name": "node", "latency_us": float("nan")}, {"name": "gpu"}]}, "key 'levels.0.latency_us'"),
        ({"levels": [{"name": "node", "speed": 1}, {"name": "gpu"}]}, "key 'levels.0.speed': Extra inputs"),
        ({"device": {"gpu_memory_gb": "80"}}, "key 'device.gpu_memory_gb'"),
        ({"color": "red"}, "key 'color': Extra inputs"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    raw = {"name": "t", "levels": TWO_LEVELS, "fanout": [2, 2]} | changes
    with pytest.raises(TopologyError, match=re.escape(said)):
        topology_from_dict({key: value for key, value in raw.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4y2", "no such file, and not a shorthand"),
        ("0x2", "each from 1"),
        ("8", "write NODESxGPUS"),
        ("1x2x3x4x5", "write NODESxGPUS"),
        ("", "cannot be read"),
    ],
)
def test_a_shorthand_that_is_none_is_explained(text: str, said: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(said)):
        load_topology(text)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"a: [", b"!!python/object/apply:os.system ['echo']", b"", b"3", b"[" * 5000]
)
def test_a_file_that_is_no_topology_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.yaml"
    path.write_bytes(content)
    with pytest.raises(TopologyError, match=r"t\.yaml"):
        load_topology(str(path))
