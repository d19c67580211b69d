"""NCCL's topology XML (`NCCL_TOPO_DUMP_FILE`): the inside of a host, and of all hosts of an NVLink domain.

`<system><cpu host_hash numaid><pci class link_speed link_width><gpu dev sm><nvlink count/></gpu>
<nic><net speed port/></nic></pci></cpu></system>`, PCI bridges nested as they are wired. Bandwidths are one way: an
NVLink by GPU generation as NCCL counts it (src/graph/topo.h), PCIe and networks at the share of their line rate that
transfers reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from xml.etree import ElementTree

from placement.errors import TopologyError
from placement.fabric.facts import NETWORK_SHARE, Gpu, HostFacts, inside_of, nvlink_bytes_s, order_notes, pci_bytes_s
from placement.fabric.hosts import Host, Inside, Reading, assemble


def read_nccl_xml(text: str, *, source: str) -> Reading:
    """The topology of one dump: one host, or as many as it has host hashes. Raises TopologyError."""
    found = _collect(text, source)
    hosts = [Host(name=name, inside=inside_of(each)) for name, each in found.items()]
    reading = assemble("nccl", hosts, (), source=source)
    told = [note for name, each in found.items() for note in order_notes(name, each)]
    return replace(reading, notes=(*reading.notes, *told))


def read_nccl_inside(text: str, *, source: str) -> Inside:
    """What a dump says of the inside of a node: its first host's. Raises TopologyError."""
    return inside_of(next(iter(_collect(text, source).values())))


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


def _collect(text: str, source: str) -> dict[str, HostFacts]:
    found: dict[str, HostFacts] = {}
    host, numa, slots = HostFacts(), 0, list[float | None]()
    gpu, link = Gpu(index=-1), 0.0
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
            host = found.setdefault(f"host-{hash_of}" if hash_of else "host-0", HostFacts())
            numa = _whole(element, "numaid", source)
        elif element.tag == "pci":
            slots.append(_pci_bytes_s(element))
        elif element.tag == "gpu":
            slot = slots[-1] if slots else None
            gpu = Gpu(index=_whole(element, "dev", source), pci_bytes_s=slot)
            link = nvlink_bytes_s(_whole(element, "sm", source, 0))
            host.gpus.setdefault(numa, []).append(gpu)
        elif element.tag == "nvlink":
            gpu.nvlink_bytes_s += _whole(element, "count", source) * link
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
    if speed is None or re.fullmatch(r"\d{1,2}", width) is None:
        return None
    return pci_bytes_s(float(speed[1]), int(width))
