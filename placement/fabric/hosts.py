"""What all readers come to: hosts, the groups above each, and what is inside; and the Topology that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.errors import TopologyError
from placement.topology import DEFAULT_LINKS, MAX_RANKS, NODE, Device, Link, Topology

SWITCH_NAMES = ("switch", "spine", "core")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The inside of one node. numa: GPUs of each NUMA domain that has any. links: of 'node', 'numa', 'gpu' if known."""

    numa: tuple[int, ...]
    links: Mapping[str, Link] = field(default_factory=dict)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        if not self.numa or min(self.numa) < 1:
            raise TopologyError(f"a node needs one GPU at least in each NUMA domain that is listed, got {self.numa}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One node: its name, and the groups that it lies in, outermost first. inside None: not known here."""

    name: str
    above: tuple[str, ...] = ()
    inside: Inside | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A topology, and what a person should know of how it was read (dropped levels, assumed figures)."""

    topology: Topology
    notes: tuple[str, ...] = ()


def gpus(count: int) -> Inside:
    """The inside of a node of which only the number of GPUs is known."""
    return Inside(numa=(count,))


def tree_levels(depth: int) -> tuple[str, ...]:
    """Names of `depth` levels of switches, outermost first: ..., tier-4, core, spine, switch."""
    names = [*SWITCH_NAMES, *(f"tier-{number}" for number in range(len(SWITCH_NAMES) + 1, depth + 1))]
    return tuple(reversed(names[:depth]))


def assemble(
    name: str,
    hosts: Sequence[Host],
    levels: Sequence[str],
    *,
    source: str,
    inside: Inside | None = None,
    links: Mapping[str, Link] | None = None,
) -> Reading:
    """Put hosts together. levels name `above`; paths that are shorter repeat their last group.

    Hosts of one group become neighbours, in the order in which groups first appear. Levels above the node that group
    nothing are left out: those with one group, and those with the groups of the level below. inside: of hosts that
    bring none. links: of levels whose figures are known, before the defaults.

    Raises TopologyError where a host appears twice, or the number of its GPUs is unknown.
    """
    _check_names(hosts, source)
    paths = [_padded(host, len(levels)) for host in hosts]
    order = _grouped_order(paths)
    insides = [_inside_of(hosts[index], inside, source) for index in order]
    sizes = [sum(each.numa) for each in insides]
    if sum(sizes) > MAX_RANKS:
        raise TopologyError(f"{source}: {sum(sizes)} GPUs; at most {MAX_RANKS} are supported")
    kept = _telling_levels(levels, [paths[index] for index in order])
    rows = [np.repeat(groups, sizes) for groups in kept.values()] + [np.repeat(np.arange(len(order)), sizes)]
    names = [*kept, NODE]
    if any(len(each.numa) > 1 for each in insides):
        domains = [gpus_there for each in insides for gpus_there in each.numa]
        rows.append(np.repeat(np.arange(len(domains)), domains))
        names.append("numa")
    rows.append(np.arange(sum(sizes)))
    names.append("gpu")
    known = _known_links(insides, links or {})
    topology = Topology(
        name=name,
        levels=tuple(names),
        groups=np.stack(rows).astype(np.int32),
        links=tuple(known.get(level, DEFAULT_LINKS.get(level, DEFAULT_LINKS["switch"])) for level in names),
        device=insides[0].device,
        node_names=tuple(hosts[index].name for index in order),
    )
    left_out = [level for level in levels if level not in kept]
    notes = [f"level '{level}' tells no nodes apart that others don't, and is left out" for level in left_out]
    guessed = [level for level in names if level not in known]
    if guessed:
        notes.append(f"bandwidth and latency are defaults for: {', '.join(guessed)}; correct them in the file")
    return Reading(topology=topology, notes=tuple(notes))


def _check_names(hosts: Sequence[Host], source: str) -> None:
    if not hosts:
        raise TopologyError(f"{source}: no host is named")
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise TopologyError(f"{source}: host '{host.name}' appears twice; a host lies in one place")
        seen.add(host.name)


def _padded(host: Host, depth: int) -> tuple[str, ...]:
    """A switch that hangs higher than others stands for itself at the levels that it lacks."""
    last = host.above[-1] if host.above else host.name
    return (*host.above, *[last] * (depth - len(host.above)))


def _grouped_order(paths: Sequence[tuple[str, ...]]) -> list[int]:
    first: dict[tuple[str, ...], int] = {}
    for index, path in enumerate(paths):
        for depth in range(len(path)):
            first.setdefault(path[: depth + 1], index)
    keys = [[first[path[: depth + 1]] for depth in range(len(path))] for path in paths]
    return sorted(range(len(paths)), key=lambda index: (keys[index], index))


def _telling_levels(levels: Sequence[str], paths: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    """The group of each host at each level that is worth a level, outermost first."""
    inner = list(range(len(paths)))
    kept: dict[str, list[int]] = {}
    for depth in reversed(range(len(levels))):
        groups = _numbered([path[: depth + 1] for path in paths])
        if max(groups) > 0 and groups != inner:
            kept[levels[depth]] = inner = groups
    return dict(reversed(kept.items()))


def _numbered(prefixes: Sequence[tuple[str, ...]]) -> list[int]:
    numbers: dict[tuple[str, ...], int] = {}
    return [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]


def _inside_of(host: Host, inside: Inside | None, source: str) -> Inside:
    found = host.inside or inside
    if found is None:
        raise TopologyError(
            f"{source}: it does not say how many GPUs host '{host.name}' has; give --gpus-per-node N, or --host FILE "
            f"with one node's NCCL topology (NCCL_TOPO_DUMP_FILE)"
        )
    return found


def _known_links(insides: Sequence[Inside], links: Mapping[str, Link]) -> dict[str, Link]:
    """Figures by level; where hosts differ, the slowest stands for all. What a fabric says of a level goes first."""
    known: dict[str, Link] = {}
    for each in insides:
        for level, link in each.links.items():
            if level not in known or link.bandwidth < known[level].bandwidth:
                known[level] = link
    return known | dict(links)
