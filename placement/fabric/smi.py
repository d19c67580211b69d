"""`nvidia-smi topo -m`: the last resort where there is no NVML library. GPUs, their NVLinks and NUMA domains."""

from __future__ import annotations

import re

from placement.errors import TopologyError
from placement.fabric.facts import Gpu, HostFacts, nvlink_bytes_s

_HEAD = re.compile(r"^\s+GPU0\b.*NUMA Affinity", re.MULTILINE)
_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")


def read_smi_matrix(text: str, *, source: str) -> HostFacts:
    """The GPUs of the printed matrix. The speed of a link is not said: the oldest NVLink's is taken.

    Raises TopologyError.
    """
    plain = _TERMINAL.sub("", text)
    head = _HEAD.search(plain)
    if head is None:
        raise TopologyError(f"{source}: not the output of `nvidia-smi topo -m`: no line with GPU0 and NUMA Affinity")
    columns = [name.strip() for name in re.split(r"\t+| {2,}", head[0].strip())]
    facts = HostFacts()
    for line in plain[head.end() :].splitlines():
        row = re.match(r"GPU(\d{1,4})\s", line)
        if row is None:
            continue
        cells = [cell.strip() for cell in re.split(r"\t+| {2,}", line.strip())][1:]
        links = [re.fullmatch(r"NV(\d{1,2})", cell) for cell in cells]
        # Each cell counts the links towards one GPU; through a switch every cell counts them all.
        most = max((int(link[1]) for link in links if link), default=0)
        numa = cells[columns.index("NUMA Affinity")] if len(cells) > columns.index("NUMA Affinity") else ""
        domain = int(numa) if numa.isdecimal() and len(numa) < 5 else 0
        gpu = Gpu(index=int(row[1]), nvlink_bytes_s=most * nvlink_bytes_s(0))
        facts.gpus.setdefault(domain, []).append(gpu)
    if not facts.gpus:
        raise TopologyError(f"{source}: no GPU in the matrix of `nvidia-smi topo -m`")
    return facts
