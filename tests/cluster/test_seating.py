"""Which labels each rank's node must have."""

from __future__ import annotations

import pytest

from cluster.config import config_from_dict
from cluster.seating import selectors_of
from placement.errors import ConfigError
from placement.topology import load_topology

TOPOLOGY = load_topology("2x2")
NODES = [{"node": "a", "rack": "r1"}, {"node": "b", "rack": "r1"}]


def test_each_rank_goes_to_its_nodes_labels() -> None:
    assert selectors_of(TOPOLOGY, NODES) == [NODES[0], NODES[0], NODES[1], NODES[1]]


def test_without_labels_any_node_will_do() -> None:
    assert selectors_of(TOPOLOGY, []) == [{}] * 4


def test_labels_are_one_set_a_node() -> None:
    with pytest.raises(ConfigError, match="node_labels has 1 entries; topology '2x2' has 2 nodes"):
        selectors_of(TOPOLOGY, NODES[:1])


def test_labels_must_tell_nodes_apart() -> None:
    with pytest.raises(ConfigError, match="nodes 0 and 1 have the same labels"):
        selectors_of(TOPOLOGY, [NODES[0], NODES[0]])


def test_a_cluster_of_ones_own_has_no_labels() -> None:
    raw = {"model": "m", "topology": "2x2", "slots_per_rank": 1, "run_dir": "r", "ray": {"node_labels": NODES}}
    with pytest.raises(ConfigError, match="'address' is 'local'"):
        config_from_dict(raw, source="config 'c'")
