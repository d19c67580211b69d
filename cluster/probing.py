"""`moetis topology probe`: this host, or all nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.probe import adapters_by_domain, host_name, numa_domains, probe_host
from placement.errors import TopologyError
from placement.fabric.facts import inside_of, order_notes
from placement.fabric.hosts import Host, Inside, Reading, assemble


def probe_this_host(inside: Inside | None) -> Reading:
    """The topology of this host alone. inside: of a machine without GPUs. Raises TopologyError where neither helps."""
    facts = probe_host()
    name = host_name()
    if facts.num_gpus == 0 and inside is None:
        domains = ", ".join(f"{number} (CPUs {cpus})" for number, cpus in numa_domains().items())
        raise TopologyError(
            f"host '{name}' has no GPU that NVML (pip install nvidia-ml-py) or nvidia-smi shows; NUMA domains: "
            f"{domains or 'none told'}; give --gpus-per-node N to lay out N ranks on its CPUs"
        )
    reading = assemble(name, [Host(name=name, inside=inside or inside_of(facts))], (), source=f"host '{name}'")
    told = [] if inside is not None else order_notes(name, facts)
    adapters = [f"{adapter} in NUMA domain {node}" for adapter, node in adapters_by_domain().items()]
    if adapters:
        told.append(f"network adapters: {', '.join(adapters)}")
    return replace(reading, notes=(*reading.notes, *told))


def probe_cluster(*, config: str | None, address: str | None, inside: Inside | None, keys: Sequence[str]) -> Reading:
    """The topology of all nodes of the cluster that serves with this config file, or that answers at this address.

    Raises ConfigError where none does, and as `topology_of_nodes`.
    """
    from cluster.config import load_config
    from cluster.local_ray import joined_cluster, read_contact
    from cluster.probe_ray import probe_nodes, topology_of_nodes

    token_path = None
    if config is not None:
        contact = read_contact(load_config(config).run_dir)
        address, token_path = contact.address, contact.token_path
    assert address is not None
    with joined_cluster(address, token_path):
        nodes = probe_nodes()
    return topology_of_nodes(nodes, inside=inside, keys=keys)
