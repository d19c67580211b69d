"""What this host is made of: GPUs from NVML, NUMA domains and network ports from sysfs.

Everything is read, nothing is guessed: a fact that a machine does not tell is left out, and the topology takes a
default that it names.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from placement.fabric.facts import NETWORK_SHARE, Gpu, HostFacts, nvlink_bytes_s, pci_bytes_s
from placement.fabric.smi import read_smi_matrix

SYSFS = Path("/sys")
_GIGA_TRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_FABRIC_READY = 3
_TO_CPU = 1
_SMI_TIMEOUT_S = 30


def probe_host(sysfs: Path = SYSFS) -> HostFacts:
    """GPUs, ports and memory of this host. Without NVML's library `nvidia-smi` is asked; without both: no GPUs."""
    facts = _gpus(sysfs)
    facts.ports = network_ports(sysfs)
    facts.host_memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return facts


def host_name() -> str:
    return socket.gethostname()


def _gpus(sysfs: Path) -> HostFacts:
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return _gpus_of_smi()
    try:
        library.nvmlInit()
    except library.NVMLError:
        return HostFacts()
    try:
        return nvml_gpus(library, sysfs)
    finally:
        library.nvmlShutdown()


def _gpus_of_smi() -> HostFacts:
    try:
        said = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return HostFacts()
    return read_smi_matrix(said.stdout, source="nvidia-smi topo -m")


def nvml_gpus(library: Any, sysfs: Path) -> HostFacts:
    """The GPUs that an initialised NVML library shows, in the NUMA domains that sysfs says."""
    facts = HostFacts()
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        gpu = Gpu(
            index=index,
            pci_bytes_s=_pci(library, handle),
            nvlink_bytes_s=_nvlinks(library, handle),
            memory=float(library.nvmlDeviceGetMemoryInfo(handle).total),
            memory_bytes_s=_memory_bytes_s(library, handle),
        )
        facts.gpus.setdefault(_numa(library, handle, sysfs), []).append(gpu)
        facts.clique = facts.clique or _clique(library, handle)
    return facts


def _ask(library: Any, function: str, *arguments: Any) -> Any:
    """What NVML answers, or None where this GPU or driver does not know."""
    try:
        return getattr(library, function)(*arguments)
    except library.NVMLError:
        return None


def _pci(library: Any, handle: Any) -> float | None:
    generation = _ask(library, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _ask(library, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    return pci_bytes_s(_GIGA_TRANSFERS.get(generation, 0.0), width or 0)


def _nvlinks(library: Any, handle: Any) -> float:
    """Bytes/s of all links that are up and lead to a GPU or a switch."""
    capability = _ask(library, "nvmlDeviceGetCudaComputeCapability", handle) or (0, 0)
    one = nvlink_bytes_s(10 * capability[0] + capability[1])
    links = 0
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        up = _ask(library, "nvmlDeviceGetNvLinkState", handle, link) == 1
        links += up and _ask(library, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) != _TO_CPU
    return links * one


def _memory_bytes_s(library: Any, handle: Any) -> float | None:
    """Bus width times the clock, two transfers a cycle."""
    bits = _ask(library, "nvmlDeviceGetMemoryBusWidth", handle)
    megahertz = _ask(library, "nvmlDeviceGetMaxClockInfo", handle, library.NVML_CLOCK_MEM)
    return bits / 8 * megahertz * 1e6 * 2 if bits and megahertz else None


def _numa(library: Any, handle: Any, sysfs: Path) -> int:
    bus = library.nvmlDeviceGetPciInfo(handle).busId
    name = (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()
    # NVML writes the PCI domain with eight digits, sysfs with four.
    node = _read_int(sysfs / "bus" / "pci" / "devices" / name[-12:] / "numa_node")
    if node is None or node < 0:
        node = _ask(library, "nvmlDeviceGetNumaNodeId", handle)
    return max(0, node or 0)


def _clique(library: Any, handle: Any) -> str | None:
    """The NVLink domain that spans hosts: cluster UUID and clique, once the fabric is up."""
    info = library.c_nvmlGpuFabricInfoV_t()
    if _ask(library, "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is None:
        return None
    uuid = bytes(info.clusterUuid)
    return f"{uuid.hex()}.{info.cliqueId}" if info.state == _FABRIC_READY and any(uuid) else None


def network_ports(sysfs: Path) -> dict[tuple[str, str], float]:
    """Bytes/s of each InfiniBand or RoCE port that is up, by adapter and port; else of the Ethernet devices."""
    ports: dict[tuple[str, str], float] = {}
    for port in sorted((sysfs / "class" / "infiniband").glob("*/ports/*")):
        rate = _read(port / "rate").split(" ")[0]
        if "ACTIVE" in _read(port / "state") and rate.replace(".", "", 1).isdecimal():
            ports[port.parent.parent.name, port.name] = float(rate) * 1e9 / 8 * NETWORK_SHARE
    if ports:
        return ports
    for device in sorted((sysfs / "class" / "net").glob("*")):
        speed = _read_int(device / "speed") if (device / "device").exists() else None
        if speed is not None and speed > 0:
            ports[device.name, "0"] = speed * 1e6 / 8 * NETWORK_SHARE
    return ports


def numa_domains(sysfs: Path = SYSFS) -> dict[int, str]:
    """The CPUs of each NUMA domain, as a list such as 0-15,32-47."""
    return {
        int(folder.name.removeprefix("node")): _read(folder / "cpulist")
        for folder in sorted((sysfs / "devices" / "system" / "node").glob("node[0-9]*"))
    }


def adapters_by_domain(sysfs: Path = SYSFS) -> dict[str, int]:
    """The NUMA domain of each InfiniBand adapter; -1 where the machine has none to tell."""
    found = {}
    for adapter in sorted((sysfs / "class" / "infiniband").glob("*")):
        node = _read_int(adapter / "device" / "numa_node")
        found[adapter.name] = -1 if node is None else node
    return found


def _read(path: Path) -> str:
    """A sysfs attribute; some exist and can't be read, such as the speed of an interface that is down."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.removeprefix("-").isdecimal() else None
