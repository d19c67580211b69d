"""A topology drawn as a tree for people."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.tree import Tree

from placement.topology import NODE, Topology

MOST_DRAWN = 24


def topology_tree(topology: Topology, everything: bool) -> Tree:
    """Groups down to the innermost level above the GPU, GPUs as ranges; of many alike the first ones, and a count."""
    sizes = f"{topology.num_nodes} nodes, {topology.num_ranks} GPUs"
    tree = Tree(f"[bold]{topology.name}[/bold]: {sizes}\n[dim]{_links(topology)}[/dim]")
    _grow(tree, topology, 0, np.arange(topology.num_ranks), topology.num_ranks if everything else MOST_DRAWN)
    return tree


def _grow(tree: Tree, topology: Topology, level: int, ranks: NDArray[np.intp], most: int) -> None:
    inside = topology.groups[level, ranks]
    groups = np.unique(inside)
    for group in groups[:most]:
        mine = ranks[inside == group]
        last = level == len(topology.levels) - 2
        branch = tree.add(_name(topology, level, int(group)) + (f": {_gpus(mine)}" if last else ""))
        if not last:
            _grow(branch, topology, level + 1, mine, most)
    if len(groups) > most:
        tree.add(f"[dim]... {len(groups) - most} more of {topology.levels[level]} (--all draws them)[/dim]")


def _name(topology: Topology, level: int, group: int) -> str:
    if topology.levels[level] == NODE and topology.node_names:
        return f"{NODE} {group} ({topology.node_names[group]})"
    return f"{topology.levels[level]} {group}"


def _gpus(ranks: NDArray[np.intp]) -> str:
    return f"gpu {ranks[0]}" if len(ranks) == 1 else f"gpu {ranks[0]}-{ranks[-1]}"


def _links(topology: Topology) -> str:
    return "; ".join(
        f"{name} {link.bandwidth / 1e9:.4g} GB/s {link.latency_s * 1e6:.4g} us"
        for name, link in zip(topology.levels, topology.links, strict=True)
    )
