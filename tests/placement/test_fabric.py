"""Topologies read from what other systems write: fixture files in their formats, in `topologies/`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import TopologyError
from placement.fabric.hostlist import expand_hosts
from placement.fabric.hosts import gpus
from placement.fabric.labels import LabelledNode, read_labels
from placement.fabric.reading import Format, parse_topology, read_inside, read_topology
from placement.topology import topology_from_dict

FIXTURES = Path(__file__).parent / "topologies"
TWO = gpus(2)


def _nodes_by_group(name: str, level: str, **options: object) -> list[list[str]]:
    """The names of the nodes in each group of a level."""
    topology = read_topology(str(FIXTURES / name), **options).topology  # type: ignore[arg-type]
    groups = topology.groups[topology.levels.index(level)]
    nodes = topology.node_of_rank()
    return [
        [topology.node_names[node] for node in np.unique(nodes[groups == group])] for group in range(groups.max() + 1)
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[201-202,205]", ["n201", "n202", "n205"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("a,b[1-2]c", ["a", "b1c", "b2c"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("n[7]", ["n7"]),
    ],
)
def test_a_host_list_is_written_out(text: str, names: list[str]) -> None:
    assert expand_hosts(text, source="test") == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n[1-", "brackets do not match"),
        ("n]1[", "brackets do not match"),
        ("n[[1]]", "brackets do not match"),
        ("n[3-1]", "runs backwards"),
        ("n[1-99999999]", "more than"),
        ("a[1-999]b[1-999]", "more than"),
        ("n[x]", "neither a number nor a range"),
        ("n[]", "neither a number nor a range"),
        ("a b", "does not belong in a name"),
        (",", "the host list is empty"),
    ],
)
def test_a_host_list_that_is_none_is_explained(text: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        expand_hosts(text, source="test")


@given(st.integers(0, 999), st.integers(0, 200), st.integers(1, 5))
def test_a_range_counts_every_host_once_and_keeps_its_zeros(first: int, more: int, width: int) -> None:
    names = expand_hosts(f"n[{first:0{width}d}-{first + more:0{width}d}]", source="test")
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) >= 1 + width for name in names)


def test_a_slurm_tree_of_uneven_height_keeps_every_leaf() -> None:
    spines = _nodes_by_group("tree.conf", "spine", inside=TWO)
    assert spines == [["n01", "n02", "n03", "n04", "n05"], ["n08", "n09", "n10", "m7"], ["login-gpu"]]
    leaves = _nodes_by_group("tree.conf", "switch", inside=TWO)
    assert [len(leaf) for leaf in leaves] == [3, 2, 4, 1]


def test_slurm_blocks_aggregate_at_their_sizes() -> None:
    assert [len(nodes) for nodes in _nodes_by_group("block.conf", "block", inside=TWO)] == [4, 4, 3]
    assert [len(nodes) for nodes in _nodes_by_group("block.conf", "block-x2", inside=TWO)] == [8, 3]


def test_topology_yaml_takes_the_default_or_the_one_that_is_named() -> None:
    assert _nodes_by_group("topology.yaml", "switch", inside=TWO) == [["node1", "node2", "node3"], ["node4", "node5"]]
    blocks = _nodes_by_group("topology.yaml", "block", inside=TWO, pick="blocks")
    assert blocks == [["node1", "node2"], ["node3", "node4"], ["node5"]]
    with pytest.raises(TopologyError, match="no topology 'x'; it has blocks, fabric, flat"):
        read_topology(str(FIXTURES / "topology.yaml"), inside=TWO, pick="x")
    with pytest.raises(TopologyError, match="topology 'flat': needs 'tree' or 'block'"):
        read_topology(str(FIXTURES / "topology.yaml"), inside=TWO, pick="flat")


def test_a_nccl_dump_gives_numa_domains_nvlink_and_network() -> None:
    topology = read_topology(str(FIXTURES / "hgx-h100.xml")).topology
    assert topology.levels == ("node", "numa", "gpu")
    assert topology.groups[1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    node, numa, gpu = (link.bandwidth for link in topology.links)
    assert node == pytest.approx(8 * 45e9)
    assert gpu == pytest.approx(18 * 20.6e9)
    assert numa == pytest.approx(4 * gpu)
    assert topology.device.host_link_bandwidth == pytest.approx(55e9, rel=0.01)


def test_a_host_without_nvlink_is_as_fast_as_its_narrowest_slot_and_its_order_is_told() -> None:
    reading = read_topology(str(FIXTURES / "pcie-uneven.xml"))
    assert np.bincount(reading.topology.groups[1]).tolist() == [1, 2]
    assert reading.topology.links[-1].bandwidth == pytest.approx(16e9 * 8 / 8 * 0.86)
    assert "CUDA_VISIBLE_DEVICES=2,0,1" in reading.notes[-1]


def test_a_dump_with_two_host_hashes_is_two_nodes() -> None:
    text = (FIXTURES / "hgx-h100.xml").read_text()
    second = text.replace("0x8d2c31f0a1b2c3d4", "0x1").replace('<system version="1">', "").replace("</system>", "")
    reading = parse_topology(text.replace("</system>", second + "</system>"), source="two")
    assert (reading.topology.num_nodes, reading.topology.num_ranks) == (2, 16)


def test_rails_of_a_unit_are_one_group_and_its_uplinks_its_link() -> None:
    assert _nodes_by_group("rails.ibnetdiscover", "switch", inside=TWO) == [["a1", "a2", "a10"], ["b1", "b2"]]
    topology = read_topology(str(FIXTURES / "rails.ibnetdiscover"), inside=TWO).topology
    switch, node, _ = (link.bandwidth for link in topology.links)
    assert node == pytest.approx(2 * 45e9)
    assert switch == pytest.approx(4 * 45e9)


def test_topograph_labels_of_both_kinds_are_read() -> None:
    assert _nodes_by_group("topograph-1.json", "spine") == [["gb1", "gb2", "gb3"], ["gb4"]]
    assert _nodes_by_group("topograph-1.json", "nvlink") == [["gb1", "gb2"], ["gb3"], ["gb4"]]
    assert np.bincount(read_topology(str(FIXTURES / "topograph-1.json")).topology.node_of_rank()).tolist() == [
        4
    ] * 3 + [2]
    assert _nodes_by_group("topograph-old.yaml", "spine") == [["w1", "w2"], ["w3"]]


def test_labels_can_be_chosen() -> None:
    keys = ("topology.kubernetes.io/zone",)
    assert _nodes_by_group("topograph-1.json", "zone", keys=keys) == [["gb1", "gb2", "gb3"], ["gb4"]]


def test_labels_that_do_not_nest_or_are_missing_are_explained() -> None:
    nodes = [LabelledNode(name=name, labels={"a": a, "b": "x"}, num_gpus=1) for name, a in (("n1", "1"), ("n2", "2"))]
    with pytest.raises(TopologyError, match=r"'n1' and 'n2' share b='x' but differ in a \('1', '2'\)"):
        read_labels(nodes, source="test", keys=("a", "b"))
    with pytest.raises(TopologyError, match="node 'n1' has no label 'c', which others have"):
        read_labels(nodes, source="test", keys=("c",))


def test_the_inside_of_a_node_can_come_from_a_nccl_dump() -> None:
    inside = read_inside(str(FIXTURES / "hgx-h100.xml"))
    topology = read_topology(str(FIXTURES / "tree.conf"), inside=inside).topology
    assert (topology.num_nodes, topology.num_ranks, topology.levels[-3:]) == (10, 80, ("node", "numa", "gpu"))


def test_a_shorthand_and_the_projects_own_file_are_read_too() -> None:
    assert read_topology("2x4").topology.num_ranks == 8
    assert read_topology(str(FIXTURES.parents[2] / "configs/topology/h200-4x8.yaml")).topology.num_ranks == 32


@pytest.mark.parametrize("path", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_what_was_read_can_be_written_and_read_back(path: Path) -> None:
    topology = read_topology(str(path), inside=None if path.suffix in (".xml", ".json") else TWO).topology
    again = topology_from_dict(topology.to_dict())
    assert again.groups.tolist() == topology.groups.tolist()
    assert (again.levels, again.node_names) == (topology.levels, topology.node_names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,c\n", "names switch 'c', which is not described"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n1\n", "hangs from itself"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", "host 'n1' appears twice"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", "switch 'a' is described twice"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a\nSwitchName=c Switches=a\n", "hangs from 'b' and from 'c'"),
        ("SwitchName=a Nodes=ALL\n", "only slurm.conf says"),
        ("SwitchName=a Nodes=n1 what\n", "line 1: not KEY=VALUE"),
        ("SwitchName=a Nodes=n1 \\\n", "ends in a line that is to be continued"),
        ("BlockName=b Nodes=n[1-2]\nBlockSizes=2,3\n", r"block sizes \[2, 3\] must be multiples"),
        ("BlockName=b Nodes=n1\nSwitchName=a Nodes=n1\n", "not both"),
        ("BlockName=b Nodes=n1\nBlockSizes=x\n", "BlockSizes needs numbers"),
        ("<system><cpu numaid='x'/></system>", "key 'numaid' must be a whole number, got 'x'"),
        ("<system><cpu numaid='0'/></system>", "no <gpu> in it"),
        ("<other/>", "begins with <other>, not <system>"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><system/>", "declares a document type"),
        ("<system>", "not XML"),
        (
            'Switch\t2 "S-01"\t# "s"\n[1]\t"H-02"[1] # "n1 mlx" lid 1 4xNDR\n',
            "which is not described: is the file whole",
        ),
        ('Switch\t2 "S-01"\t# "s"\n[1]\t"S-01"[1] # "n1 mlx" lid 1 4xWARP\n', "line 2: needs a width and a speed"),
        ('Switch\t2 "S-01"\t# "s"\n', "no host adapter in it"),
        ("[]", "key 'topologies'"),
        ("[{topology: a, tree: {switches: []}}]", "key 'topologies.0.tree.switches'"),
        ("{}", "needs the output of `kubectl get nodes"),
        ('{"items": [{"metadata": {}}]}', r"items\[0\]: not a node"),
        ('{"n": {"nvidia.com/gpu.count": "many"}}', "must be a number of GPUs, got 'many'"),
        ('{"n": {"nvidia.com/gpu.count": "0"}}', "no node with a GPU among 1 nodes"),
        ("just text", "needs the output of"),
        ("[" * 1200, "no format that is known"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(text: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        parse_topology(text, source="test", inside=TWO)


def test_a_format_that_is_named_is_not_guessed() -> None:
    with pytest.raises(TopologyError, match="not XML"):
        parse_topology("SwitchName=a Nodes=n1", source="test", form=Format.NCCL)


def test_gpus_that_nothing_says_are_asked_for() -> None:
    with pytest.raises(TopologyError, match=re.escape("give --gpus-per-node N, or --host FILE")):
        read_topology(str(FIXTURES / "tree.conf"))


def test_a_file_that_is_absent_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    for name in ("a", "b"):
        with pytest.raises(TopologyError, match=f"{tmp_path}/{name}': cannot be read"):
            read_topology(str(tmp_path / name))


@settings(max_examples=50)
@given(
    st.sampled_from(sorted(path.name for path in FIXTURES.iterdir())),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.text(max_size=6)), min_size=1, max_size=4),
)
def test_a_damaged_file_is_read_or_refused_with_one_clear_error(
    name: str, damage: list[tuple[float, int, str]]
) -> None:
    text = (FIXTURES / name).read_text()
    for where, length, instead in damage:
        start = int(where * len(text))
        text = text[:start] + instead + text[start + length :]
    try:
        reading = parse_topology(text, source=name, inside=TWO)
    except TopologyError as error:
        assert name in str(error)
        assert len(str(error)) < 1000
    else:
        assert reading.topology.num_ranks >= 1
