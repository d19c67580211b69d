"""Slurm's topology.conf and topology.yaml: trees of switches, or blocks with sizes at which they aggregate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placement.errors import TopologyError
from placement.fabric.hostlist import expand_hosts
from placement.fabric.hosts import Host, Inside, Reading, assemble, tree_levels
from placement.topology import first_problem

MOST_LEVELS = 16
_ASSIGNMENT = re.compile(r"([A-Za-z]\w*)=(\S*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    """children: switches below it; nodes: hosts on it."""

    name: str
    children: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    name: str
    nodes: tuple[str, ...]


def read_slurm_conf(text: str, *, source: str, inside: Inside | None = None) -> Reading:
    """A topology.conf. inside: what each node has, which Slurm does not say here. Raises TopologyError."""
    switches: list[_Switch] = []
    blocks: list[_Block] = []
    sizes: tuple[int, ...] = ()
    for where, pairs in _conf_lines(text, source):
        if "switchname" in pairs:
            switches.append(
                _Switch(
                    name=pairs["switchname"],
                    children=_names(pairs.get("switches"), f"{where}: Switches"),
                    nodes=_names(pairs.get("nodes"), f"{where}: Nodes"),
                )
            )
        elif "blockname" in pairs:
            blocks.append(_Block(name=pairs["blockname"], nodes=_names(pairs.get("nodes"), f"{where}: Nodes")))
        elif "blocksizes" in pairs:
            sizes = _sizes(pairs["blocksizes"], where)
        else:
            raise TopologyError(f"{where}: needs SwitchName=, BlockName= or BlockSizes=, got {sorted(pairs)}")
    if bool(switches) == bool(blocks):
        raise TopologyError(f"{source}: needs SwitchName= lines or BlockName= lines, and not both")
    if switches:
        return _tree(switches, source, inside)
    return _blocks(blocks, sizes, source, inside)


def _conf_lines(text: str, source: str) -> Iterable[tuple[str, dict[str, str]]]:
    """(where, {key in lower case: value}) of each line; `\\` continues a line, `#` starts a comment."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        first = first if joined else number
        joined += line.split("#", 1)[0].rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        line, joined = joined.strip(), ""
        if not line:
            continue
        pairs = {key.lower(): value for key, value in _ASSIGNMENT.findall(line)}
        if _ASSIGNMENT.sub("", line).strip() or not pairs:
            raise TopologyError(f"{source}: line {first}: not KEY=VALUE: '{line[:80]}'")
        yield f"{source}: line {first}", pairs
    if joined.strip():
        raise TopologyError(f"{source}: line {first}: the file ends in a line that is to be continued")


def _names(text: str | None, where: str) -> tuple[str, ...]:
    if text is None:
        return ()
    if text.upper() == "ALL":
        raise TopologyError(f"{where}=ALL: only slurm.conf says which hosts that is; name them here")
    return tuple(expand_hosts(text, source=where))


def _sizes(text: str, where: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) < 8 for part in parts):
        raise TopologyError(f"{where}: BlockSizes needs numbers of nodes such as 4,8; got '{text[:40]}'")
    return tuple(int(part) for part in parts)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _YamlSwitch(_Strict):
    switch: str
    children: str | None = None
    nodes: str | None = None
    link_speed: Any = None


class _YamlBlock(_Strict):
    block: str
    nodes: str | None = None


class _YamlTree(_Strict):
    switches: list[_YamlSwitch] = Field(min_length=1)


class _YamlBlocks(_Strict):
    block_sizes: list[int] = Field(default_factory=list)
    blocks: list[_YamlBlock] = Field(min_length=1)


class _YamlTopology(_Strict):
    topology: str
    cluster_default: bool = False
    tree: _YamlTree | None = None
    block: _YamlBlocks | None = None
    flat: Any = None


class _YamlFile(_Strict):
    topologies: list[_YamlTopology] = Field(min_length=1)


def read_slurm_yaml(raw: Any, *, source: str, inside: Inside | None = None, pick: str | None = None) -> Reading:
    """A topology.yaml, parsed. pick names the topology to take; else the cluster's default, else the first.

    Raises TopologyError.
    """
    try:
        listed = _YamlFile.model_validate({"topologies": raw}).topologies
    except ValidationError as error:
        raise TopologyError(f"{source}: {first_problem(error)}") from error
    if pick is not None:
        named = [each for each in listed if each.topology == pick]
        if not named:
            raise TopologyError(f"{source}: no topology '{pick}'; it has {', '.join(each.topology for each in listed)}")
        chosen = named[0]
    else:
        chosen = next((each for each in listed if each.cluster_default), listed[0])
    where = f"{source}: topology '{chosen.topology}'"
    if chosen.tree is not None and chosen.block is None:
        switches = [
            _Switch(
                name=each.switch,
                children=_names(each.children, f"{where}: switch '{each.switch}': children"),
                nodes=_names(each.nodes, f"{where}: switch '{each.switch}': nodes"),
            )
            for each in chosen.tree.switches
        ]
        return _tree(switches, where, inside)
    if chosen.block is not None and chosen.tree is None:
        blocks = [
            _Block(name=each.block, nodes=_names(each.nodes, f"{where}: block '{each.block}': nodes"))
            for each in chosen.block.blocks
        ]
        return _blocks(blocks, tuple(chosen.block.block_sizes), where, inside)
    raise TopologyError(f"{where}: needs 'tree' or 'block' (a flat topology says nothing about the network)")


def _tree(switches: list[_Switch], source: str, inside: Inside | None) -> Reading:
    known = {switch.name: switch for switch in switches}
    if len(known) < len(switches):
        twice = next(switch.name for switch in switches if sum(other.name == switch.name for other in switches) > 1)
        raise TopologyError(f"{source}: switch '{twice}' is described twice")
    parent: dict[str, str] = {}
    for switch in switches:
        for child in switch.children:
            if child not in known:
                raise TopologyError(f"{source}: switch '{switch.name}' names switch '{child}', which is not described")
            if child in parent:
                raise TopologyError(
                    f"{source}: switch '{child}' hangs from '{parent[child]}' and from '{switch.name}'; that is no tree"
                )
            parent[child] = switch.name
    hosts = [
        Host(name=node, above=_way_down(switch.name, parent, source)) for switch in switches for node in switch.nodes
    ]
    levels = tree_levels(max((len(host.above) for host in hosts), default=0))
    return assemble("slurm-tree", hosts, levels, source=source, inside=inside)


def _way_down(name: str, parent: dict[str, str], source: str) -> tuple[str, ...]:
    way = [name]
    while way[-1] in parent:
        way.append(parent[way[-1]])
        if len(way) > MOST_LEVELS:
            raise TopologyError(
                f"{source}: switch '{name}' has more than {MOST_LEVELS} switches above it, or hangs from itself: "
                f"{' < '.join(way[:6])} ..."
            )
    return tuple(reversed(way))


def _blocks(blocks: list[_Block], sizes: tuple[int, ...], source: str, inside: Inside | None) -> Reading:
    """Blocks, and above them the larger sizes: consecutive blocks of size s / smallest size make one of size s."""
    sizes = tuple(sorted(sizes))
    if sizes and (sizes[0] < 1 or any(size % sizes[0] for size in sizes)):
        raise TopologyError(f"{source}: block sizes {list(sizes)} must be multiples of the first, each from 1 up")
    larger = [size // sizes[0] for size in sizes if size > sizes[0]]
    hosts = []
    for number, block in enumerate(blocks):
        above = tuple(f"{factor}.{number // factor}" for factor in reversed(larger))
        hosts += [Host(name=node, above=(*above, block.name)) for node in block.nodes]
    levels = [*(f"block-x{factor}" for factor in reversed(larger)), "block"]
    return assemble("slurm-block", hosts, levels, source=source, inside=inside)
