"""Probing all nodes of a Ray cluster: each probes itself, and their labels and NVLink domains group them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.probe import probe_host
from placement.errors import MoetisError, TopologyError
from placement.fabric.facts import HostFacts, inside_of, order_notes
from placement.fabric.hosts import Inside, Reading
from placement.fabric.labels import CLIQUE_LABEL, LabelledNode, read_labels

PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedNode:
    """A node of the cluster: Ray's name and labels, and what its own probe found."""

    name: str
    labels: dict[str, str]
    facts: HostFacts


def probe_nodes() -> list[ProbedNode]:
    """Ask every live node of the connected cluster. Raises MoetisError where one does not answer."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    task = ray.remote(probe_host).options(num_cpus=0, max_retries=0)
    refs = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in alive
    ]
    try:
        facts = ray.get(refs, timeout=PROBE_TIMEOUT_S)
    except GetTimeoutError as error:
        raise MoetisError(f"not all of {len(alive)} nodes answered within {PROBE_TIMEOUT_S:.0f} s") from error
    except RayError as error:
        raise MoetisError(f"a node could not be probed: {str(error).splitlines()[-1]}") from error
    names = _names(alive)
    return [
        ProbedNode(name=name, labels=dict(node.get("Labels") or {}), facts=found)
        for name, node, found in zip(names, alive, facts, strict=True)
    ]


def _names(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Host names; where several nodes run on one host, with the start of Ray's id."""
    hosts = [str(node["NodeManagerHostname"]) for node in nodes]
    return [
        host if hosts.count(host) == 1 else f"{host}-{node['NodeID'][:8]}"
        for host, node in zip(hosts, nodes, strict=True)
    ]


def topology_of_nodes(
    nodes: Sequence[ProbedNode], *, inside: Inside | None = None, keys: Sequence[str] = ()
) -> Reading:
    """A topology of probed nodes, grouped by labels and cliques. inside: of all nodes, in place of what was found.

    Raises TopologyError where there is no GPU on any node, and as `read_labels`.
    """
    if inside is None and not any(node.facts.num_gpus for node in nodes):
        raise TopologyError(
            f"none of {len(nodes)} nodes has a GPU that NVML or nvidia-smi shows; "
            f"give --gpus-per-node N to lay out N ranks (on CPUs) on each"
        )
    cliques = all(node.facts.clique for node in nodes if node.facts.num_gpus)
    labelled = [
        LabelledNode(
            name=node.name,
            labels=node.labels | ({CLIQUE_LABEL: str(node.facts.clique)} if cliques else {}),
            num_gpus=None if inside is not None else node.facts.num_gpus,
        )
        for node in nodes
    ]
    insides = {node.name: inside_of(node.facts) for node in nodes if node.facts.num_gpus and inside is None}
    reading = read_labels(labelled, source="the cluster", inside=inside, insides=insides, keys=keys)
    told = [note for node in nodes if node.name in insides for note in order_notes(node.name, node.facts)]
    return replace(reading, notes=(*reading.notes, *told))
