"""A worker's process on the CPUs next to its GPU: pinned host memory and copies then stay inside one NUMA domain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")


def bind_near(device: torch.device, sysfs: Path = SYSFS) -> frozenset[int]:
    """Keep all threads of this process, and those to come, on the CPUs near a GPU. Returns these; none: not bound.

    Does nothing for the CPU as a device, and where the machine does not say where the GPU is.
    """
    if device.type != "cuda":
        return frozenset()
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    cpus = cpus_to_bind(cpus_near(bus, sysfs), os.sched_getaffinity(0))
    if cpus:
        # The call binds one thread; Ray has started others already.
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), cpus)
    return cpus


def cpus_near(bus: str, sysfs: Path) -> frozenset[int]:
    """The CPUs of the NUMA domain of a PCI device (`0000:3b:00.0`); none where sysfs does not tell."""
    try:
        domain = int((sysfs / "bus" / "pci" / "devices" / bus / "numa_node").read_text())
        # -1: the firmware does not say, or there is one domain only.
        if domain < 0:
            return frozenset()
        return parse_cpu_list((sysfs / "devices" / "system" / "node" / f"node{domain}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def cpus_to_bind(near: frozenset[int], allowed: set[int]) -> frozenset[int]:
    """Those near the GPU that this process may use; none where that would change nothing, or leave it no CPU."""
    both = near & allowed
    return frozenset() if both == allowed else both


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8,10-11` as the kernel writes it. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
