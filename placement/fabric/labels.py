"""Labels of Kubernetes nodes: zones, what Topograph writes of switches and NVLink domains, and the number of GPUs.

Input is `kubectl get nodes -o json` (or yaml), or a plain mapping {node: {label: value}}, such as Ray's node labels.
Topograph: github.com/NVIDIA/topograph, docs/reference/node-labels-and-annotations; fabric tier 0 is nearest the node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from placement.errors import TopologyError
from placement.fabric.hosts import SWITCH_NAMES, Host, Inside, Reading, assemble, gpus
from placement.topology import DEFAULT_LINKS, NODE, Link

GPU_COUNT = "nvidia.com/gpu.count"
GPU_RESOURCE = "nvidia.com/gpu"
_TIER = re.compile(r"fabric\.topograph\.run/tier-(\d{1,2})")
_OUTER = {
    "topology.kubernetes.io/region": "region",
    "topology.kubernetes.io/zone": "zone",
    "ray.io/availability-region": "region",
    "ray.io/availability-zone": "zone",
}
_SWITCHES = tuple(f"network.topology.nvidia.com/{name}" for name in ("core", "spine", "leaf"))
CLIQUE_LABEL = "nvidia.com/gpu.clique"
_DOMAINS = ("accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator", CLIQUE_LABEL)
_SUB_DOMAIN = "accelerator.topograph.run/sub-domain"
_NAMES = _OUTER | dict(zip(_SWITCHES, ("core", "spine", "switch"), strict=True)) | {_SUB_DOMAIN: "nvlink-part"}
NVLINK_LEVEL = "nvlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledNode:
    """One node: its labels, and its GPUs where something says how many."""

    name: str
    labels: Mapping[str, str]
    num_gpus: int | None


def nodes_of_mapping(raw: Any, *, source: str) -> list[LabelledNode]:
    """Nodes of `kubectl get nodes -o json`, of one node object, or of {node: {label: value}}. Raises TopologyError."""
    if isinstance(raw, dict) and isinstance(raw.get("items"), list):
        return [_node_object(each, f"{source}: items[{index}]") for index, each in enumerate(raw["items"])]
    if isinstance(raw, dict) and "metadata" in raw:
        return [_node_object(raw, source)]
    if not isinstance(raw, dict) or not raw or not all(isinstance(labels, dict) for labels in raw.values()):
        raise TopologyError(
            f"{source}: needs the output of `kubectl get nodes -o json`, or a mapping {{node: {{label: value}}}}"
        )
    return [_labelled(str(name), labels, {}, f"{source}: node '{name}'") for name, labels in raw.items()]


def _node_object(raw: Any, where: str) -> LabelledNode:
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise TopologyError(f"{where}: not a node: key 'metadata.name' is missing")
    status = raw.get("status")
    capacity = status.get("capacity") if isinstance(status, dict) else None
    labels = metadata.get("labels") or {}
    if not isinstance(labels, dict):
        raise TopologyError(f"{where}: key 'metadata.labels' must be a mapping, got {str(labels)[:40]!r}")
    return _labelled(metadata["name"], labels, capacity if isinstance(capacity, dict) else {}, where)


def _labelled(name: str, labels: dict[Any, Any], capacity: dict[Any, Any], where: str) -> LabelledNode:
    count = labels.get(GPU_COUNT, capacity.get(GPU_RESOURCE))
    if count is not None and re.fullmatch(r"\d{1,4}", str(count)) is None:
        raise TopologyError(f"{where}: '{GPU_COUNT}' must be a number of GPUs, got {str(count)[:40]!r}")
    return LabelledNode(
        name=name,
        labels={str(key): str(value) for key, value in labels.items()},
        num_gpus=None if count is None else int(count),
    )


def read_labels(
    nodes: Sequence[LabelledNode],
    *,
    source: str,
    inside: Inside | None = None,
    insides: Mapping[str, Inside] | None = None,
    keys: Sequence[str] = (),
) -> Reading:
    """Group nodes by labels. keys: the labels to use, outermost first; those of Kubernetes and Topograph unless given.

    Nodes without GPUs are left out, and told. inside goes before the number of GPUs that labels say; insides are those
    of single nodes, by name.
    Raises TopologyError where a group lies in two groups of the level above it, or a node lacks a label that others
    have.
    """
    kept = [node for node in nodes if node.num_gpus != 0]
    if not kept:
        raise TopologyError(f"{source}: no node with a GPU among {len(nodes)} nodes")
    chosen = list(keys) or _present_keys(kept)
    own = insides or {}
    hosts = [
        Host(name=node.name, above=_path(node, chosen, source), inside=own.get(node.name, _inside(node, inside)))
        for node in kept
    ]
    _check_nested(hosts, chosen, source)
    levels = [_level_name(key, chosen) for key in chosen]
    links = _links(levels, max((node.num_gpus or 0) for node in kept))
    reading = assemble("kubernetes", hosts, levels, source=source, inside=inside, links=links)
    skipped = [node.name for node in nodes if node.num_gpus == 0]
    if skipped:
        told = f"{len(skipped)} nodes without GPUs are left out: {', '.join(skipped[:5])}"
        reading = replace(reading, notes=(*reading.notes, told))
    return reading


def _inside(node: LabelledNode, inside: Inside | None) -> Inside | None:
    return gpus(node.num_gpus) if inside is None and node.num_gpus is not None else inside


def _present_keys(nodes: Sequence[LabelledNode]) -> list[str]:
    """The known labels that any node carries, outermost first. Of several names for one thing the newest counts."""
    there = {key for node in nodes for key in node.labels}
    tiers = sorted((key for key in there if _TIER.fullmatch(key)), key=lambda key: -int(key.rsplit("-", 1)[1]))
    switches = tiers or [key for key in _SWITCHES if key in there]
    domain = [key for key in _DOMAINS if key in there][:1]
    sub = [_SUB_DOMAIN] if _SUB_DOMAIN in there and domain else []
    return [*(key for key in _OUTER if key in there), *switches, *domain, *sub]


def _path(node: LabelledNode, keys: Sequence[str], source: str) -> tuple[str, ...]:
    missing = [key for key in keys if not node.labels.get(key)]
    if missing:
        raise TopologyError(
            f"{source}: node '{node.name}' has no label '{missing[0]}', which others have; label it, or choose labels "
            f"with --label"
        )
    return tuple(node.labels[key] for key in keys)


def _check_nested(hosts: Sequence[Host], keys: Sequence[str], source: str) -> None:
    for depth in range(1, len(keys)):
        first: dict[str, Host] = {}
        for host in hosts:
            other = first.setdefault(host.above[depth], host)
            if other.above[depth - 1] != host.above[depth - 1]:
                raise TopologyError(
                    f"{source}: nodes '{other.name}' and '{host.name}' share {keys[depth]}='{host.above[depth]}' but "
                    f"differ in {keys[depth - 1]} ('{other.above[depth - 1]}', '{host.above[depth - 1]}'); choose "
                    f"labels that nest with --label, outermost first"
                )


def _level_name(key: str, keys: Sequence[str]) -> str:
    tier = _TIER.fullmatch(key)
    if tier is not None:
        below = sum(1 for other in keys if (found := _TIER.fullmatch(other)) and int(found[1]) < int(tier[1]))
        return SWITCH_NAMES[below] if below < len(SWITCH_NAMES) else f"tier-{below + 1}"
    if key in _DOMAINS:
        return NVLINK_LEVEL
    return _NAMES.get(key, key.rsplit("/", 1)[-1] or key)


def _links(levels: Sequence[str], gpus_per_node: int) -> dict[str, Link]:
    """Nodes of one NVLink domain reach each other by NVLink: as fast as their GPUs' ports together."""
    if NVLINK_LEVEL not in levels:
        return {}
    port = DEFAULT_LINKS["gpu"]
    return {NODE: Link(bandwidth=port.bandwidth * max(1, gpus_per_node), latency_s=port.latency_s)}
