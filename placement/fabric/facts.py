"""What is known of one host's GPUs and ports, wherever it was read, and the inside of a node that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from placement.fabric.hosts import Inside
from placement.topology import DEFAULT_LINKS, NODE, Device, Link

# Bytes/s of one link, one way, by compute capability, as NCCL counts them (src/graph/topo.h).
NVLINK_BYTES_S = {60: 18.0e9, 70: 20.0e9, 80: 20.0e9, 86: 12.0e9, 90: 20.6e9, 100: 40.1e9}
# The share of a line's rate that large transfers reach.
NETWORK_SHARE, PCI_SHARE = 0.9, 0.86
_SMALLER_LINKS = {86}


@dataclass(slots=True, kw_only=True)
class Gpu:
    """index: CUDA's number. pci_bytes_s: its slot, None if unknown. nvlink_bytes_s: all its links. memory in bytes."""

    index: int
    pci_bytes_s: float | None = None
    nvlink_bytes_s: float = 0.0
    memory: float | None = None
    memory_bytes_s: float | None = None


@dataclass(slots=True, kw_only=True)
class HostFacts:
    """gpus by NUMA domain; bytes/s of each network port; clique: the NVLink domain that spans hosts, if in one."""

    gpus: dict[int, list[Gpu]] = field(default_factory=dict)
    ports: dict[tuple[str, str], float] = field(default_factory=dict)
    host_memory: float | None = None
    clique: str | None = None

    @property
    def device_order(self) -> list[int]:
        """CUDA's number of each rank's GPU: ranks go domain by domain."""
        return [gpu.index for numa in sorted(self.gpus) for gpu in self.gpus[numa]]

    @property
    def num_gpus(self) -> int:
        return sum(map(len, self.gpus.values()))


def nvlink_bytes_s(capability: int) -> float:
    """One link's bytes/s of a GPU generation (90 for 9.0); one that is not listed counts as the last before it."""
    if capability in NVLINK_BYTES_S:
        return NVLINK_BYTES_S[capability]
    older = [known for known in NVLINK_BYTES_S if known <= capability and known not in _SMALLER_LINKS]
    return NVLINK_BYTES_S[max(older, default=60)]


def pci_bytes_s(giga_transfers: float, width: int) -> float | None:
    """One way through a PCIe slot; None where a figure is missing."""
    return giga_transfers * 1e9 / 8 * width * PCI_SHARE or None


def inside_of(facts: HostFacts) -> Inside:
    """The node of a host that has a GPU at least. The slowest GPU stands for all."""
    gpus = [gpu for each in facts.gpus.values() for gpu in each]
    numa = tuple(len(facts.gpus[number]) for number in sorted(facts.gpus))
    nvlink = min(gpu.nvlink_bytes_s for gpu in gpus)
    slots = [gpu.pci_bytes_s for gpu in gpus if gpu.pci_bytes_s is not None]
    latency = DEFAULT_LINKS["gpu"].latency_s
    links: dict[str, Link] = {}
    if nvlink:
        links["gpu"] = Link(bandwidth=nvlink, latency_s=latency)
        links["numa"] = Link(bandwidth=nvlink * min(numa), latency_s=latency)
    elif slots:
        # Without NVLink all of a domain's traffic shares the link between sockets: taken to be one slot's, no more.
        links["gpu"] = links["numa"] = Link(bandwidth=min(slots), latency_s=latency)
    network = sum(facts.ports.values())
    if network:
        links[NODE] = Link(bandwidth=network, latency_s=DEFAULT_LINKS[NODE].latency_s)
    return Inside(numa=numa, links=links, device=_device(facts, gpus, slots))


def _device(facts: HostFacts, gpus: list[Gpu], slots: list[float]) -> Device:
    usual = Device()
    memory = [gpu.memory for gpu in gpus if gpu.memory]
    memory_rates = [gpu.memory_bytes_s for gpu in gpus if gpu.memory_bytes_s]
    return Device(
        gpu_memory=min(memory, default=usual.gpu_memory),
        hbm_bandwidth=min(memory_rates, default=usual.hbm_bandwidth),
        host_link_bandwidth=min(slots, default=usual.host_link_bandwidth),
        host_memory_per_node=facts.host_memory or usual.host_memory_per_node,
    )


def order_notes(name: str, facts: HostFacts) -> list[str]:
    """Where CUDA counts the GPUs otherwise than by NUMA domain, a process must be told."""
    order = facts.device_order
    if order == sorted(order):
        return []
    listed = ",".join(map(str, order))
    return [f"{name}: ranks follow NUMA domains, CUDA's numbers don't: CUDA_VISIBLE_DEVICES={listed}"]
