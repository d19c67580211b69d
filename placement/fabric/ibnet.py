"""`ibnetdiscover`: the InfiniBand fabric as it is cabled.

Blocks of `Switch N "S-guid" # "name"` or `Ca N "H-guid" # "host hca"`, each with a line a port:
`[22] "H-guid"[1](port guid) # "host hca" lid 4 4xNDR`. A host's adapters often hang from different leaf switches (a
rail each), so hosts that share any leaf make one group; groups that share any switch of the next tier make one above,
and so on until all are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from placement.errors import TopologyError
from placement.fabric.hosts import Host, Inside, Reading, assemble, tree_levels
from placement.topology import DEFAULT_LINKS, NODE, Link

_GBIT_A_LANE = {
    "SDR": 2.0,
    "DDR": 4.0,
    "QDR": 8.0,
    "FDR10": 10.0,
    "FDR": 13.64,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}
LINE_SHARE = 0.9
_BLOCK = re.compile(r'(Switch|Ca|Rt)\s+\d+\s+"([SHR]-[0-9a-fA-F]+)"\s*(?:#\s*"([^"]*)")?')
_PORT = re.compile(r'\[(\d+)\]\S*\s+"([SHR]-[0-9a-fA-F]+)"\[(\d+)\]\S*\s*(.*)$')
_SPEED = re.compile(r"\b(\d{1,2})x([A-Z]{3}\d{0,2})\b")
_NOT_A_HOST = "Aggregation Node"
_NO_NAME = re.compile(r"MT\d+\b|$")


@dataclass(slots=True, kw_only=True)
class _Device:
    """A switch or an adapter: what it calls itself, and (other device, bytes/s) of each cabled port."""

    name: str
    ports: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fabric:
    """hosts: name -> the ids of its adapters. devices: by id."""

    devices: dict[str, _Device]
    hosts: dict[str, list[str]]


def read_ibnetdiscover(text: str, *, source: str, inside: Inside | None = None) -> Reading:
    """The hosts of a fabric by the switches that they share. inside: what each node has. Raises TopologyError."""
    fabric = _hosts_of(_devices(text, source), source)
    tiers = _tiers(fabric)
    groups, names = _group(fabric, tiers)
    hosts = [Host(name=host, above=groups[host]) for host in fabric.hosts]
    levels = tree_levels(len(tiers))
    links = {NODE: _slowest([_total(fabric, adapters, None) for adapters in fabric.hosts.values()], NODE)}
    for height, level in enumerate(reversed(levels[1:])):
        above = set(tiers[height + 1])
        links[level] = _slowest([_total(fabric, group, above) for group in names[height]], level)
    return assemble("infiniband", hosts, levels, source=source, inside=inside, links=links)


def _devices(text: str, source: str) -> dict[str, _Device]:
    devices: dict[str, _Device] = {}
    open_device: _Device | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}: line {number}"
        if line.startswith(("Switch", "Ca", "Rt")):
            block = _BLOCK.match(line)
            if block is None:
                raise TopologyError(f"{where}: not a device: '{line[:80]}'")
            if block[2] in devices:
                raise TopologyError(f"{where}: device {block[2]} is described twice")
            open_device = devices[block[2]] = _Device(name=block[3] or "")
        elif line.startswith("["):
            port = _PORT.match(line)
            if port is None or open_device is None:
                raise TopologyError(f"{where}: not a port of a device: '{line[:80]}'")
            open_device.ports.append((port[2], _speed(port[4], where)))
    if not devices:
        raise TopologyError(f"{source}: no 'Switch' and no 'Ca' in it; it should be the output of ibnetdiscover")
    for device in devices.values():
        for other, _ in device.ports:
            if other not in devices:
                raise TopologyError(f"{source}: a port leads to {other}, which is not described: is the file whole?")
    return devices


def _speed(rest: str, where: str) -> float:
    found = _SPEED.findall(rest)
    if not found or found[-1][1] not in _GBIT_A_LANE:
        known = ", ".join(_GBIT_A_LANE)
        raise TopologyError(f"{where}: needs a width and a speed such as 4xNDR ({known}), got '{rest[-40:]}'")
    return int(found[-1][0]) * _GBIT_A_LANE[found[-1][1]] * 1e9 / 8 * LINE_SHARE


def _hosts_of(devices: dict[str, _Device], source: str) -> _Fabric:
    """Adapters by host: the first word of what an adapter calls itself. One without a name is a host of its own."""
    hosts: dict[str, list[str]] = {}
    for guid, device in devices.items():
        if guid.startswith("H-") and _NOT_A_HOST not in device.name and device.ports:
            name = guid if _NO_NAME.match(device.name) else device.name.split()[0]
            hosts.setdefault(name, []).append(guid)
    if not hosts:
        raise TopologyError(f"{source}: no host adapter in it, only switches")
    return _Fabric(devices=devices, hosts=dict(sorted(hosts.items(), key=lambda item: _natural(item[0]))))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """n2 before n10."""
    return [(1, int(part[:18]), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", name)]


def _tiers(fabric: _Fabric) -> list[list[str]]:
    """Switches by their distance from the nearest host: leaves first."""
    near = [guid for adapters in fabric.hosts.values() for guid in adapters]
    seen = set(near)
    tiers: list[list[str]] = []
    while True:
        reached = dict.fromkeys(
            other for guid in near for other, _ in fabric.devices[guid].ports if other.startswith("S-")
        )
        near = [guid for guid in reached if guid not in seen]
        if not near:
            return tiers
        seen.update(near)
        tiers.append(near)


def _group(fabric: _Fabric, tiers: list[list[str]]) -> tuple[dict[str, tuple[str, ...]], list[list[set[str]]]]:
    """The groups of each host, outermost first, and for each tier from the leaves up its groups' switches."""
    members = {host: set(adapters) for host, adapters in fabric.hosts.items()}
    paths: dict[str, tuple[str, ...]] = dict.fromkeys(members, ())
    by_tier: list[list[set[str]]] = []
    for tier in tiers:
        switches = set(tier)
        alike = {id(own): own for own in members.values()}
        reached = {
            key: {other for guid in own for other, _ in fabric.devices[guid].ports if other in switches}
            for key, own in alike.items()
        }
        reach = {host: reached[id(own)] for host, own in members.items()}
        joined = _joined(reach)
        by_tier.append(list({id(group): group for group in joined.values()}.values()))
        for host, group in joined.items():
            paths[host] = (min(group, default=host), *paths[host])
            members[host] = group
    return paths, by_tier


def _joined(reach: dict[str, set[str]]) -> dict[str, set[str]]:
    """Hosts that share any switch get one set, the union; a host that reaches none keeps an empty set of its own."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for switches in reach.values():
        first, *others = sorted(switches) or [""]
        for other in others:
            root[find(other)] = find(first)
    unions: dict[str, set[str]] = {}
    for switches in reach.values():
        if switches:
            unions.setdefault(find(min(switches)), set()).update(switches)
    return {host: unions[find(min(switches))] if switches else set() for host, switches in reach.items()}


def _total(fabric: _Fabric, guids: Iterable[str], towards: set[str] | None) -> float:
    """Bytes/s of all ports of these devices that lead to the given ones (to anything for None)."""
    return sum(
        speed for guid in guids for other, speed in fabric.devices[guid].ports if towards is None or other in towards
    )


def _slowest(totals: list[float], level: str) -> Link:
    latency = DEFAULT_LINKS.get(level, DEFAULT_LINKS["switch"]).latency_s
    cabled = [total for total in totals if total > 0]
    return Link(bandwidth=min(cabled, default=DEFAULT_LINKS[NODE].bandwidth), latency_s=latency)
