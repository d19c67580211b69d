"""One layer, down the topology tree: cut, fill spare slots, search; then the same inside every child, to the rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.core import EMPTY
from placement.cover import MOST_UNITS, masks_of, serve_units
from placement.errors import PlacementError
from placement.partition import align, cut
from placement.refine import Costs, Sample, Stage, refine
from placement.replicas import fewest_copies, fill_spare, slots_of_parts
from placement.topology import DEFAULT_LINKS, NODE, Topology

MOST_PRICE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A group of the topology tree. ranks: ascending; children: at most 64, none for a single rank.

    crosses_nodes: whether the children lie on different nodes. visit_price: what a visit to another child costs, by its
    link's bandwidth, against one on usual links of this kind.
    """

    ranks: tuple[int, ...]
    children: tuple[Branch, ...] = ()
    crosses_nodes: bool = False
    visit_price: float = 1.0


def tree_of(topology: Topology) -> Branch:
    """The tree without levels of one child; more than 64 children are gathered under groups of equal size."""
    return _branch(topology, -1, np.arange(topology.num_ranks))


def _branch(topology: Topology, level: int, ranks: NDArray[Any]) -> Branch:
    if len(ranks) == 1:
        return Branch(ranks=(int(ranks[0]),))
    inside = topology.groups[level + 1, ranks]
    if (inside == inside[0]).all():
        return _branch(topology, level + 1, ranks)
    children = [_branch(topology, level + 1, ranks[inside == group]) for group in np.unique(inside)]
    return _gathered(children, level + 1 <= topology.node_level, _visit_price(topology, level + 1))


def _visit_price(topology: Topology, level: int) -> float:
    """Between nodes, against the node's own link; inside a node, against a GPU's usual advantage over a usual NIC."""
    node, link = topology.links[topology.node_level].bandwidth, topology.links[level].bandwidth
    usual = 1.0 if level <= topology.node_level else DEFAULT_LINKS[NODE].bandwidth / DEFAULT_LINKS["gpu"].bandwidth
    return float(np.clip(node / link / usual, 1 / MOST_PRICE, MOST_PRICE))


def _gathered(children: list[Branch], crosses_nodes: bool, visit_price: float) -> Branch:
    ranks = tuple(rank for child in children for rank in child.ranks)
    if len(children) > MOST_UNITS:
        size = int(np.ceil(np.sqrt(len(children))))
        groups = [children[first : first + size] for first in range(0, len(children), size)]
        children = [_gathered(group, crosses_nodes, visit_price) if len(group) > 1 else group[0] for group in groups]
    return Branch(ranks=ranks, children=tuple(children), crosses_nodes=crosses_nodes, visit_price=visit_price)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the descent needs beside the sample: costs and search stages between nodes, and inside one.

    rows_of_rank [R]: the slots of each rank. num_groups: groups of experts that lie on one node as a whole, 0 for none.
    """

    rows_of_rank: NDArray[np.int64]
    num_experts: int
    num_groups: int
    between: Costs
    inside: Costs
    between_stages: tuple[Stage, ...]
    inside_stages: tuple[Stage, ...]


@nb.njit(cache=True, nogil=True)
def _count(chosen: Any, home: Any, pairs: Any, demand: Any) -> None:
    """pairs [E, E]: tokens with both experts (load on the diagonal); demand [U, E]: tokens at home at a unit."""
    for token in range(chosen.shape[0]):
        for one in chosen[token]:
            if one >= 0:
                if home[token] >= 0:
                    demand[home[token], one] += 1
                for two in chosen[token]:
                    if two >= 0:
                        pairs[one, two] += 1


@nb.njit(cache=True, nogil=True)
def _serve_all(chosen: Any, home: Any, masks: Any, served: Any) -> None:
    for token in range(len(chosen)):
        serve_units(chosen[token], home[token], masks, served[token])


@nb.njit(cache=True, nogil=True)
def _share_of_unit(chosen: Any, served: Any, unit: Any) -> Any:
    """The tokens that a unit serves some expert for: their index [n], and those experts [n, K], -1 for the others."""
    num_tokens, top_k = chosen.shape
    kept = np.empty(num_tokens, np.int64)
    experts = np.full((num_tokens, top_k), -1, np.int16)
    num_kept = 0
    for token in range(num_tokens):
        found = 0
        for k in range(top_k):
            if served[token, k] == unit:
                experts[num_kept, found] = chosen[token, k]
                found += 1
        kept[num_kept] = token
        num_kept += found > 0
    return kept[:num_kept], experts[:num_kept]


def place_layer(tree: Branch, sample: Sample, settings: Settings, seed: int) -> NDArray[np.int32]:
    """Rows [R, rows] of one layer. sample: the layer's tokens; their homes are ranks."""
    rows = np.full((len(tree.ranks), int(settings.rows_of_rank.max())), EMPTY, np.int32)
    _descend(tree, np.arange(settings.num_experts, dtype=np.int32), sample, settings, seed, rows)
    return rows


def _descend(
    branch: Branch, experts: NDArray[np.int32], sample: Sample, settings: Settings, seed: int, rows: NDArray[np.int32]
) -> None:
    if not branch.children:
        rows[branch.ranks[0], : len(experts)] = experts
        return
    unit_of_rank = np.full(len(rows) + 1, -1, np.int16)
    for unit, child in enumerate(branch.children):
        unit_of_rank[list(child.ranks)] = unit
    local = replace(sample, home=unit_of_rank[sample.home])
    slots = _solve(branch, experts, local, settings, seed)
    inner = sample
    if any(child.children for child in branch.children):
        masks, _ = masks_of(slots, settings.num_experts)
        served = np.full(sample.chosen.shape, -1, np.int8)
        _serve_all(local.chosen, local.home, masks, served)
    for unit, child in enumerate(branch.children):
        if child.children:
            kept, chosen = _share_of_unit(sample.chosen, served, unit)
            inner = Sample(chosen=chosen, home=sample.home[kept], group=sample.group[kept])
        held = slots[unit][slots[unit] != EMPTY]
        _descend(child, np.sort(held), inner, settings, seed * 64 + unit + 1, rows)


def _solve(
    branch: Branch, experts: NDArray[np.int32], sample: Sample, settings: Settings, seed: int
) -> NDArray[np.int32]:
    """Slots [U, C] of a branch's children: METIS, names lined up with homes, spare slots filled, then the search."""
    num_ranks = np.array([len(child.ranks) for child in branch.children])
    rows = np.array([settings.rows_of_rank[list(child.ranks)].sum() for child in branch.children])
    if branch.crosses_nodes and settings.num_groups:
        return _solve_groups(branch, experts, sample, settings, seed, rows, num_ranks / num_ranks.sum())
    sizes = np.minimum(rows, len(experts)).astype(np.int64)
    share = num_ranks / num_ranks.sum()
    return _place_units(branch, experts, sample, settings, settings.num_experts, sizes, share, seed)


def _solve_groups(
    branch: Branch,
    experts: NDArray[np.int32],
    sample: Sample,
    settings: Settings,
    seed: int,
    rows: NDArray[np.int64],
    share: NDArray[np.float64],
) -> NDArray[np.int32]:
    """As `_solve`, with whole groups of experts in the place of experts: a node takes as many as fit into its rows."""
    width = settings.num_experts // settings.num_groups
    groups = np.unique(experts // width).astype(np.int32)
    whole = replace(sample, chosen=np.where(sample.chosen >= 0, sample.chosen // width, -1).astype(np.int16))
    room = np.array(
        [_groups_that_fit(child, settings.rows_of_rank, width) for child in branch.children], dtype=np.int64
    )
    sizes = np.minimum(room, len(groups))
    held = _place_units(branch, groups, whole, settings, settings.num_groups, sizes, share, seed)
    slots = np.full((len(sizes), int(rows.max())), EMPTY, np.int32)
    for unit, mine in enumerate(held):
        inside = (mine[mine != EMPTY][:, None] * width + np.arange(width)).reshape(-1)
        slots[unit, : len(inside)] = np.sort(inside)
    return slots


def _groups_that_fit(branch: Branch, rows_of_rank: NDArray[np.int64], width: int) -> int:
    """Whole groups of width experts that a branch can take, each on one node."""
    if branch.crosses_nodes:
        return sum(_groups_that_fit(child, rows_of_rank, width) for child in branch.children)
    return int(rows_of_rank[list(branch.ranks)].sum()) // width


def check_groups(num_groups: int, rows_of_rank: NDArray[np.int64], topology: Topology, num_experts: int) -> None:
    """Raises PlacementError where groups are asked for that do not divide the experts, or do not fit on the nodes."""
    if num_groups == 0:
        return
    if num_groups < 0 or num_experts % num_groups:
        raise PlacementError(f"{num_experts} experts do not divide into {num_groups} groups of equal size")
    width = num_experts // num_groups
    fit = np.bincount(topology.node_of_rank(), weights=rows_of_rank).astype(np.int64) // width
    if fit.sum() < num_groups:
        raise PlacementError(
            f"{num_groups} groups of {width} experts do not fit whole on {len(fit)} nodes, which take "
            f"{fit.tolist()} groups with their slots per layer; give more slots, or do not keep groups together"
        )


def _place_units(
    branch: Branch,
    experts: NDArray[np.int32],
    sample: Sample,
    settings: Settings,
    num_experts: int,
    sizes: NDArray[np.int64],
    share: NDArray[np.float64],
    seed: int,
) -> NDArray[np.int32]:
    """Slots [U, C] for units of sizes [U] that should carry share [U] of the load."""
    pairs = np.zeros((num_experts, num_experts))
    demand = np.zeros((len(sizes), num_experts))
    _count(sample.chosen, sample.home, pairs, demand)
    load = pairs.diagonal().copy()
    np.fill_diagonal(pairs, 0)
    if branch.crosses_nodes:
        part = cut(load[experts], pairs[np.ix_(experts, experts)], sizes, share, seed)
    else:
        part = _deal(load[experts], sizes, share)
    part = align(part, demand[:, experts], sizes)
    costs = settings.between if branch.crosses_nodes else settings.inside
    costs = replace(costs, visit=costs.visit * branch.visit_price)
    spare = int(sizes.sum()) - len(experts) if costs.balance else 0
    fewest = fewest_copies(load, experts, spare, len(sizes), load.sum() / len(branch.ranks))
    slots = fill_spare(slots_of_parts(part, experts, sizes), sizes, load, pairs, demand, fewest)
    stages = settings.between_stages if branch.crosses_nodes else settings.inside_stages
    for number, stage in enumerate(stages):
        slots = refine(slots, sizes, share, sample, num_experts, costs, stage, seed + number, fewest=fewest)
    return slots


def _deal(load: NDArray[np.float64], sizes: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Deal experts to units, heaviest first, each to the unit with a free slot that lacks most: part [n]."""
    part = np.zeros(len(load), np.int64)
    lack, free = load.sum() * share, sizes.copy()
    for expert in np.argsort(-load, kind="stable"):
        unit = int(np.argmax(np.where(free > 0, lack, -np.inf)))
        part[expert] = unit
        lack[unit] -= load[expert]
        free[unit] -= 1
    return part
