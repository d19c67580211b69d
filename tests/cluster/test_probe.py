"""The probe on machines that are not here: a sysfs tree in a folder, and a library that answers as NVML does."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.probe import adapters_by_domain, network_ports, numa_domains, nvml_gpus, probe_host
from cluster.probe_ray import ProbedNode, topology_of_nodes
from placement.errors import TopologyError
from placement.fabric.facts import Gpu, HostFacts, inside_of
from placement.fabric.hosts import gpus
from placement.fabric.smi import read_smi_matrix
from tests.cluster.running_cli import moetis_here


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets; GPU slots 0000:1b and 0000:9d; two InfiniBand adapters, one of which is down; one Ethernet card."""
    for node, cpus in ((0, "0-15"), (1, "16-31")):
        _file(tmp_path / f"devices/system/node/node{node}/cpulist", cpus)
    for bus, node in (("0000:1b:00.0", 1), ("0000:9d:00.0", 0)):
        _file(tmp_path / f"bus/pci/devices/{bus}/numa_node", str(node))
    for name, node, state in (("mlx5_0", 0, "4: ACTIVE"), ("mlx5_1", 1, "1: DOWN")):
        adapter = tmp_path / "class/infiniband" / name
        _file(adapter / "device/numa_node", str(node))
        _file(adapter / "ports/1/rate", "400 Gb/sec (4X NDR)")
        _file(adapter / "ports/1/state", state)
    _file(tmp_path / "class/net/eth0/device/vendor", "0x8086")
    _file(tmp_path / "class/net/eth0/speed", "25000")
    _file(tmp_path / "class/net/docker0/speed", "10000")
    return tmp_path


class Nvml:
    """Two H100 with 18 links each as the library shows them: the second answers 'not supported' to half of it."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_CLOCK_MEM = 2

    class NVMLError(Exception):
        pass

    class c_nvmlGpuFabricInfoV_t(ctypes.Structure):
        _fields_ = (("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint8))

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=("00000000:1B:00.0", "00000000:9D:00.0")[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=85899345920)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        self._or_not(handle)
        return 16

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        self._or_not(handle)
        return 5120

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return 2619

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, info: Any) -> int:
        self._or_not(handle)
        filled = info._obj
        filled.clusterUuid[0], filled.cliqueId, filled.state = 7, 3, 3
        return 0

    def _or_not(self, handle: int) -> None:
        if handle == 1:
            raise self.NVMLError("Not Supported")


def test_gpus_lie_in_the_numa_domains_that_sysfs_says(sysfs: Path) -> None:
    facts = nvml_gpus(Nvml(), sysfs)
    assert {numa: [gpu.index for gpu in mine] for numa, mine in facts.gpus.items()} == {0: [1], 1: [0]}
    assert facts.device_order == [1, 0]
    assert facts.clique == "07" + 15 * "00" + ".3"


def test_what_one_gpu_does_not_tell_is_left_out(sysfs: Path) -> None:
    facts = nvml_gpus(Nvml(), sysfs)
    first, second = facts.gpus[1][0], facts.gpus[0][0]
    assert first.pci_bytes_s == pytest.approx(55e9, rel=0.01)
    assert first.memory_bytes_s == pytest.approx(3.35e12, rel=0.01)
    assert first.nvlink_bytes_s == second.nvlink_bytes_s == pytest.approx(18 * 20.6e9)
    assert (second.pci_bytes_s, second.memory_bytes_s) == (None, None)
    assert inside_of(facts).numa == (1, 1)


def test_ports_that_are_down_and_virtual_devices_do_not_count(sysfs: Path) -> None:
    assert network_ports(sysfs) == {("mlx5_0", "1"): pytest.approx(45e9)}
    (sysfs / "class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert network_ports(sysfs) == {("eth0", "0"): pytest.approx(25e9 / 8 * 0.9)}


def test_domains_and_adapters_are_listed(sysfs: Path, tmp_path: Path) -> None:
    assert numa_domains(sysfs) == {0: "0-15", 1: "16-31"}
    assert adapters_by_domain(sysfs) == {"mlx5_0": 0, "mlx5_1": 1}
    assert numa_domains(tmp_path / "empty") == {}


def test_this_host_can_be_probed() -> None:
    facts = probe_host()
    assert facts.host_memory is not None
    assert facts.host_memory > 1e8


MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-15\t0\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t16-31\t1\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\n"
)


def test_the_matrix_of_nvidia_smi_will_do_as_a_last_resort() -> None:
    facts = read_smi_matrix(MATRIX, source="smi")
    assert facts.device_order == [0, 1]
    assert inside_of(facts).numa == (1, 1)
    assert facts.gpus[0][0].nvlink_bytes_s == pytest.approx(18 * 18e9)
    with pytest.raises(TopologyError, match="not the output of"):
        read_smi_matrix("command not found", source="smi")


def _node(name: str, rack: str, clique: str | None = None, num_gpus: int = 2) -> ProbedNode:
    facts = HostFacts(gpus={0: [Gpu(index=index) for index in range(num_gpus)]} if num_gpus else {}, clique=clique)
    return ProbedNode(name=name, labels={"rack": rack}, facts=facts)


def test_nodes_of_a_ray_cluster_are_grouped_by_a_label_of_ones_own() -> None:
    nodes = [_node("a", "r1"), _node("b", "r2"), _node("c", "r1", num_gpus=1), _node("head", "r1", num_gpus=0)]
    reading = topology_of_nodes(nodes, keys=["rack"])
    assert reading.topology.levels == ("rack", "node", "gpu")
    assert reading.topology.node_names == ("a", "c", "b")
    assert reading.topology.node_of_rank().tolist() == [0, 0, 1, 2, 2]
    assert any("left out: head" in note for note in reading.notes)


def test_nodes_of_one_nvlink_domain_are_neighbours() -> None:
    nodes = [_node("a", "r", "u.1"), _node("b", "r", "u.2"), _node("c", "r", "u.1")]
    topology = topology_of_nodes(nodes).topology
    assert topology.levels == ("nvlink", "node", "gpu")
    assert topology.node_names == ("a", "c", "b")


def test_a_cluster_without_gpus_needs_to_be_told_how_many_ranks() -> None:
    nodes = [_node("a", "r", num_gpus=0), _node("b", "r", num_gpus=0)]
    with pytest.raises(TopologyError, match=r"none of 2 nodes has a GPU .* give --gpus-per-node N"):
        topology_of_nodes(nodes)
    assert topology_of_nodes(nodes, inside=gpus(3)).topology.num_ranks == 6


FIXTURES = Path(__file__).parents[1] / "placement" / "topologies"


def test_a_fabric_is_converted_and_the_file_can_be_planned_with(tmp_path: Path) -> None:
    out = tmp_path / "t.yaml"
    inside = ["--host", str(FIXTURES / "hgx-h100.xml")]
    result = moetis_here("topology", "convert", str(FIXTURES / "rails.ibnetdiscover"), *inside, "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "level 'spine' tells no nodes apart" in result.stderr
    assert yaml.safe_load(out.read_text())["node_names"] == ["a1", "a2", "a10", "b1", "b2"]
    shown = moetis_here("topology", "show", str(out))
    assert "numa 9: gpu 36-39" in shown.stdout


def test_the_tree_of_a_slurm_cluster_is_drawn() -> None:
    shown = moetis_here("topology", "show", str(FIXTURES / "tree.conf"), "--gpus-per-node", "8")
    assert shown.exit_code == 0
    assert "slurm-tree: 10 nodes, 80 GPUs" in shown.stdout
    assert "└── node 9 (login-gpu): gpu 72-79" in shown.stdout


def test_a_probe_gives_json_and_asks_where_it_finds_no_gpu() -> None:
    probed = moetis_here("topology", "probe", "--gpus-per-node", "2", "--json")
    assert json.loads(probed.stdout)["tree"] == [[0, 1]]
    both = moetis_here("topology", "probe", "--config", "x", "--address", "y")
    assert "give --config or --address, not both" in str(both.exception)
