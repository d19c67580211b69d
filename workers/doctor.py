"""Look at the machine that a worker is to run on: link, memory, limits. Each finding says what was expected.

Nothing is changed on the machine. Bandwidths are measured with 256 MiB; the PCIe link is read right after a copy, since
idle links slow down.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from workers.cuda_edge import link_for
from workers.pinning import HostRows

PROBE_BYTES = 256 << 20
PROBE_ROUNDS = 4
PROBE_ROWS = 16
USABLE_SHARE_OF_LINK = 0.75
# GB/s a lane and direction, after encoding, by PCIe generation.
LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
SHM_SHARE_OF_MEMORY = 0.5


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at; advice is empty where the verdict is ok."""

    name: str
    found: str
    verdict: Verdict
    advice: str = ""


def examine() -> list[Finding]:
    """Everything that can be said of this machine; without a GPU, of its memory alone."""
    findings = [locked_memory(), shared_memory(), memory_limit()]
    if not torch.cuda.is_available():
        return [
            Finding(
                name="gpu",
                found="none",
                verdict=Verdict.ABSENT,
                advice="no CUDA device is visible; workers run on the CPU, with threads in place of streams",
            ),
            *findings,
        ]
    for index in range(torch.cuda.device_count()):
        findings += _examine_gpu(index)
    return [*findings, _nccl()]


def locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    root = os.geteuid() == 0
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
    if soft == resource.RLIM_INFINITY or root:
        return Finding(name="locked memory", found=text + (" (root: not enforced)" if root else ""), verdict=Verdict.OK)
    return Finding(
        name="locked memory",
        found=text,
        verdict=Verdict.WARNING,
        advice="RDMA needs `ulimit -l unlimited`, and so does CUDA where it refuses to pin the experts' memory",
    )


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """The node's slab of experts lies there."""
    if not path.is_dir():
        return Finding(
            name="shared memory", found="none", verdict=Verdict.ABSENT, advice=f"mount a tmpfs at {path} for the slab"
        )
    usage = shutil.disk_usage(path)
    found = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.total >= SHM_SHARE_OF_MEMORY * 0.9 * allowed_memory():
        return Finding(name="shared memory", found=found, verdict=Verdict.OK)
    return Finding(
        name="shared memory",
        found=found,
        verdict=Verdict.WARNING,
        advice=f"the experts must fit there; enlarge it (docker run --shm-size, or mount -o remount,size=... {path})",
    )


def memory_limit() -> Finding:
    return Finding(name="host memory", found=f"{allowed_memory() / 2**30:.1f} GiB may be used", verdict=Verdict.OK)


def allowed_memory() -> int:
    """Bytes that this process may use: the smaller of the machine's memory and the cgroup's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            total = min(total, int(text))
    return total


def _examine_gpu(index: int) -> list[Finding]:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    name = f"gpu {index}"
    pinned = copy_bandwidth(device, pinned=True)
    pageable = copy_bandwidth(device, pinned=False)
    return [
        Finding(name=name, found=f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", verdict=Verdict.OK),
        *_link(index, name, pinned),
        Finding(
            name=f"{name} pinned copy",
            found=f"{pinned / 1e9:.1f} GB/s",
            verdict=Verdict.OK if pinned > 1.5 * pageable else Verdict.WARNING,
            advice="" if pinned > 1.5 * pageable else "no faster than pageable memory: pinning does not work here",
        ),
        Finding(name=f"{name} pageable copy", found=f"{pageable / 1e9:.1f} GB/s", verdict=Verdict.OK),
        Finding(
            name=f"{name} through a ring",
            found=f"{bounced_bandwidth(device) / 1e9:.1f} GB/s (experts that CUDA does not pin)",
            verdict=Verdict.OK,
        ),
        _numa(name, properties),
    ]


def copy_bandwidth(device: torch.device, *, pinned: bool) -> float:
    """Bytes/s from host to device, the best of a few copies of 256 MiB."""
    source = torch.ones(PROBE_BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(PROBE_ROUNDS):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return PROBE_BYTES / best


def bounced_bandwidth(device: torch.device) -> float:
    """Bytes/s of blobs from memory that is not pinned, as they go where CUDA refuses to pin it."""
    source = torch.ones((PROBE_ROWS, PROBE_BYTES // PROBE_ROWS), dtype=torch.uint8)
    target = torch.empty_like(source, device=device)
    link = link_for(device, HostRows(source, 0))
    best = float("inf")
    for _ in range(PROBE_ROUNDS):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        link.copy(list(zip(target, source, strict=True)), after=None, urgent=True).finish()
        best = min(best, time.perf_counter() - begun)
    link.close()
    return PROBE_BYTES / best


def _link(index: int, name: str, pinned: float) -> list[Finding]:
    fields = "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", str(index)]
        row = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        advice = f"nvidia-smi does not answer: {error}"
        return [Finding(name=f"{name} link", found="unknown", verdict=Verdict.ABSENT, advice=advice)]
    driver, *numbers = (part.strip() for part in row.split(","))
    result = [Finding(name=f"{name} driver", found=driver, verdict=Verdict.OK)]
    if len(numbers) != 4 or not all(part.isdecimal() for part in numbers):
        advice = "the virtual machine hides the PCIe link; go by the measured copies"
        return [*result, Finding(name=f"{name} link", found="hidden", verdict=Verdict.ABSENT, advice=advice)]
    return [*result, judge_link(name, [int(part) for part in numbers], pinned)]


def judge_link(name: str, numbers: list[int], pinned: float) -> Finding:
    """numbers: generation now and at most, width now and at most. pinned: measured bytes/s."""
    generation, best_generation, width, best_width = numbers
    found = f"PCIe {generation} x{width} (can do {best_generation} x{best_width})"
    possible = LANE_GBS.get(best_generation, 0.0) * best_width
    if (generation, width) != (best_generation, best_width):
        advice = "the link runs below what the card can do: look at the slot, riser and BIOS"
        return Finding(name=f"{name} link", found=found, verdict=Verdict.WARNING, advice=advice)
    if pinned / 1e9 < USABLE_SHARE_OF_LINK * possible:
        advice = f"measured {pinned / 1e9:.0f} GB/s of {possible:.0f}: is memory on the GPU's own NUMA node?"
        return Finding(name=f"{name} link", found=found, verdict=Verdict.WARNING, advice=advice)
    return Finding(name=f"{name} link", found=found, verdict=Verdict.OK)


def _numa(name: str, properties: object) -> Finding:
    parts = [getattr(properties, key, None) for key in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    path = Path("/sys/bus/pci/devices") / "{:04x}:{:02x}:{:02x}.0".format(*(part or 0 for part in parts)) / "numa_node"
    node = path.read_text().strip() if path.is_file() else "-1"
    if node == "-1":
        return Finding(name=f"{name} NUMA node", found="one node, or not told", verdict=Verdict.OK)
    table = Path(f"/sys/devices/system/node/node{node}/distance")
    distances = table.read_text().split() if table.is_file() else []
    return Finding(name=f"{name} NUMA node", found=f"{node}, distances {' '.join(distances)}", verdict=Verdict.OK)


def _nccl() -> Finding:
    if not torch.distributed.is_nccl_available():
        return Finding(name="NCCL", found="none", verdict=Verdict.ABSENT, advice="install torch with NCCL")
    return Finding(name="NCCL", found=".".join(map(str, _nccl_version())), verdict=Verdict.OK)


def _nccl_version() -> tuple[int, ...]:
    version: Any = torch.cuda.nccl.version  # untyped in torch
    found: tuple[int, ...] = version()
    return found
