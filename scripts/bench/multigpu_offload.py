"""Stage `offload`: ranks that pull experts from one host's memory, alone and all at once; what NUMA binding changes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from multigpu_crew import Crew, seconds_of, slowest

from workers.numa import parse_cpu_list
from workers.pinning import host_memory

BLOB, BLOBS = 12 << 20, 170
GB = 1e9
NODES = Path("/sys/devices/system/node")


def numa_nodes() -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node of this machine."""
    found = {}
    for folder in sorted(NODES.glob("node[0-9]*")):
        found[int(folder.name[4:])] = parse_cpu_list((folder / "cpulist").read_text())
    return found


def stage_offload(crew: Crew) -> None:
    groups = crew.meet()
    nodes = {node: cpus for node, cpus in numa_nodes().items() if cpus}
    allowed = os.sched_getaffinity(0)
    bindings = {"as started": allowed}
    if len(nodes) > 1:
        bindings |= {f"node {node}": cpus & allowed for node, cpus in nodes.items() if cpus & allowed}
    for name, cpus in bindings.items():
        os.sched_setaffinity(0, cpus)
        _measure(crew, groups, name)
    os.sched_setaffinity(0, allowed)
    crew.note("numa", nodes=len(nodes), binding="measured" if len(nodes) > 1 else "one node: nothing to bind to")
    groups.leave()


def _measure(crew: Crew, groups: object, binding: str) -> None:
    """Memory is touched first, hence placed, by threads of the bound CPUs."""
    blob, count = (BLOB, BLOBS) if crew.cuda else (1 << 12, 4)
    host = host_memory(count, blob, pin=crew.cuda).rows
    crew.keep.append(host)
    device = torch.zeros((count, blob), dtype=torch.uint8, device=crew.device)
    control = groups.control  # type: ignore[attr-defined]

    def pull() -> None:
        for row, source in zip(device, host, strict=True):
            row.copy_(source, non_blocking=True)

    def push() -> None:
        for row, source in zip(device, host, strict=True):
            source.copy_(row, non_blocking=True)

    for what, work in (("pull", pull), ("push", push)):
        alone = []
        for rank in range(crew.num_ranks):
            mine = work if crew.rank == rank else _nothing
            alone.append(count * blob / seconds_of(crew, control, mine, 2) / GB)
        together = count * blob / seconds_of(crew, control, work, 2) / GB
        crew.note(
            f"{what}, {binding}",
            alone_gb_s=[round(rate, 1) for rate in alone],
            together_gb_s_each=together,
            together_of_alone=together / min(alone),
        )
    slowest(control, 0.0)


def _nothing() -> None:
    return
