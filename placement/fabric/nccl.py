"""NCCL's topology XML (`NCCL_TOPO_DUMP_FILE`): the inside of a host, and of all hosts of an NVLink domain.

`<system><cpu host_hash numaid><pci class link_speed link_width><gpu dev sm><nvlink count/></gpu>
<nic><net speed port/></nic></pci></cpu></system>`, PCI bridges nested as they are wired. Bandwidths are one way: an
NVLink by GPU generation as NCCL counts it (src/graph/topo.h), PCIe and networks at the share of their line rate that
transfers reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast
from xml.etree import ElementTree

from placement.errors import TopologyError
from placement.fabric.hosts import Host, Inside, Reading, assemble
from placement.topology import DEFAULT_LINKS, NODE, Device, Link

NVLINK_BYTES_S = {60: 18.0e9, 70: 20.0e9, 80: 20.0e9, 86: 12.0e9, 90: 20.6e9, 100: 40.1e9}
NETWORK_SHARE, PCI_SHARE = 0.9, 0.86


@dataclass(slots=True, kw_only=True)
class _Gpu:
    """dev: CUDA's number. pci_bytes_s: its slot, None where the file does not say. nvlink_bytes_s: all its links."""

    dev: int
    sm: int
    pci_bytes_s: float | None
    nvlink_bytes_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Found:
    """What one host's part of the file holds: GPUs by NUMA id, and the speed of each network port, bytes/s."""

    gpus: dict[int, list[_Gpu]] = field(default_factory=dict)
    ports: dict[tuple[str, str], float] = field(default_factory=dict)


def read_nccl_xml(text: str, *, source: str) -> Reading:
    """The topology of one dump: one host, or as many as it has host hashes. Raises TopologyError."""
    found = _collect(text, source)
    hosts = [Host(name=name, inside=_inside(each)) for name, each in found.items()]
    reading = assemble("nccl", hosts, (), source=source)
    return replace(reading, notes=(*reading.notes, *_order_notes(found)))


def read_nccl_inside(text: str, *, source: str) -> Inside:
    """What a dump says of the inside of a node: its first host's. Raises TopologyError."""
    return _inside(next(iter(_collect(text, source).values())))


def _elements(text: str, source: str) -> Iterator[tuple[str, ElementTree.Element]]:
    """('start' or 'end', element), without recursion. A document type, the way to entities, is refused."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise TopologyError(f"{source}: declares a document type, which a NCCL topology never does; refused")
    parser: ElementTree.XMLPullParser[Any] = ElementTree.XMLPullParser(("start", "end"))
    try:
        parser.feed(text)
        parser.close()
        yield from cast(Iterator[tuple[str, ElementTree.Element]], parser.read_events())
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise TopologyError(f"{source}: not XML: {error}") from error


def _collect(text: str, source: str) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    host, numa, slots = _Found(), 0, list[float | None]()
    gpu: _Gpu | None = None
    root: str | None = None
    for kind, element in _elements(text, source):
        root = root or element.tag
        if root != "system":
            raise TopologyError(f"{source}: not a NCCL topology: it begins with <{root[:40]}>, not <system>")
        if kind == "end":
            if element.tag == "pci":
                slots.pop()
            continue
        if element.tag == "cpu":
            hash_of = element.get("host_hash", "")
            host = found.setdefault(f"host-{hash_of}" if hash_of else "host-0", _Found())
            numa = _whole(element, "numaid", source)
        elif element.tag == "pci":
            slots.append(_pci_bytes_s(element))
        elif element.tag == "gpu":
            slot = slots[-1] if slots else None
            gpu = _Gpu(dev=_whole(element, "dev", source), sm=_whole(element, "sm", source, 0), pci_bytes_s=slot)
            host.gpus.setdefault(numa, []).append(gpu)
        elif element.tag == "nvlink" and gpu is not None:
            gpu.nvlink_bytes_s += _whole(element, "count", source) * _nvlink_bytes_s(gpu.sm)
        elif element.tag == "net":
            port = (element.get("guid", element.get("name", "")), element.get("port", ""))
            host.ports[port] = _whole(element, "speed", source, 0) * 1e6 / 8 * NETWORK_SHARE
    with_gpus = {name: each for name, each in found.items() if each.gpus}
    if not with_gpus:
        raise TopologyError(f"{source}: no <gpu> in it; dump it from a process that uses the GPUs")
    return with_gpus


def _whole(element: ElementTree.Element, key: str, source: str, default: int | None = None) -> int:
    text = element.get(key)
    if text is None and default is not None:
        return default
    if text is None or re.fullmatch(r"-?\d{1,9}", text) is None:
        raise TopologyError(f"{source}: <{element.tag}>: key '{key}' must be a whole number, got {text!r}")
    if int(text) < -1:
        raise TopologyError(f"{source}: <{element.tag}>: key '{key}' must not be negative, got {text}")
    return max(0, int(text))


def _pci_bytes_s(element: ElementTree.Element) -> float | None:
    """From link_speed such as "32.0 GT/s PCIe" and link_width; None where the file says "Unknown" or nothing."""
    speed = re.match(r"(\d{1,4}(?:\.\d{1,4})?) ?GT/s", element.get("link_speed", ""))
    width = element.get("link_width", "")
    if speed is None or re.fullmatch(r"\d{1,2}", width) is None or not float(speed[1]) * int(width):
        return None
    return float(speed[1]) * 1e9 / 8 * int(width) * PCI_SHARE


def _nvlink_bytes_s(sm: int) -> float:
    """One link's bytes/s of a GPU generation; a newer one counts as the newest known."""
    if sm in NVLINK_BYTES_S:
        return NVLINK_BYTES_S[sm]
    older = [known for known in NVLINK_BYTES_S if known <= sm and known != 86]
    return NVLINK_BYTES_S[max(older, default=60)]


def _inside(found: _Found) -> Inside:
    gpus = [gpu for each in found.gpus.values() for gpu in each]
    numa = tuple(len(found.gpus[number]) for number in sorted(found.gpus))
    links: dict[str, Link] = {}
    nvlink = min(gpu.nvlink_bytes_s for gpu in gpus)
    slots = [gpu.pci_bytes_s for gpu in gpus if gpu.pci_bytes_s is not None]
    latency = DEFAULT_LINKS["gpu"].latency_s
    if nvlink:
        links = {
            "gpu": Link(bandwidth=nvlink, latency_s=latency),
            "numa": Link(bandwidth=nvlink * min(numa), latency_s=latency),
        }
    elif slots:
        # Without NVLink all of a domain's traffic shares the link between sockets: no faster than one slot, as assumed.
        links = {
            "gpu": Link(bandwidth=min(slots), latency_s=latency),
            "numa": Link(bandwidth=min(slots), latency_s=latency),
        }
    if sum(found.ports.values()):
        links[NODE] = Link(bandwidth=sum(found.ports.values()), latency_s=DEFAULT_LINKS[NODE].latency_s)
    device = Device(host_link_bandwidth=min(slots)) if slots else Device()
    return Inside(numa=numa, links=links, device=device)


def _order_notes(found: dict[str, _Found]) -> list[str]:
    """Ranks go domain by domain; where CUDA counts otherwise, a process must be told."""
    notes = []
    for name, each in found.items():
        order = [gpu.dev for number in sorted(each.gpus) for gpu in each.gpus[number]]
        if order != sorted(order):
            listed = ",".join(map(str, order))
            notes.append(f"{name}: ranks follow NUMA domains, CUDA's numbers don't: CUDA_VISIBLE_DEVICES={listed}")
    return notes
