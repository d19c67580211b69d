"""A cluster that serves, from start to end: its folder, its Ray, its workers, and what tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.config import ClusterConfig, history_path
from cluster.fleet import Fleet
from cluster.local_ray import Contact, joined_cluster, local_cluster, write_contact
from cluster.meter import Meter
from cluster.rundir import held
from cluster.terminal import LOG, Notes
from placement.errors import MoetisError
from placement.topology import Topology, load_topology


@dataclass(frozen=True, slots=True)
class Cluster:
    """What serves, before anybody knows of it."""

    config: ClusterConfig
    topology: Topology
    contact: Contact
    notes: Notes
    fleet: Fleet

    @contextmanager
    def announced(self, text: str) -> Iterator[None]:
        """It is up, which text says; until the context ends other commands find it."""
        path = write_contact(self.config.run_dir, self.contact)
        try:
            self.notes.up(text)
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def opened(config: ClusterConfig, failed: Callable[[MoetisError], None]) -> Iterator[Cluster]:
    """Start everything; it ends with the context. failed is told, once, what ended the service for good."""
    topology = load_topology(config.topology)
    with (
        held(config.run_dir),
        _ray(config, topology.num_ranks) as contact,
        LOG.status("starting ...") as status,
    ):
        notes = Notes(status)
        with Fleet(config, note=notes, failed=failed) as fleet, Meter(fleet.status, history_path(config)):
            yield Cluster(config, topology, contact, notes, fleet)


@contextmanager
def _ray(config: ClusterConfig, num_ranks: int) -> Iterator[Contact]:
    """The Ray cluster that a configuration names: one of its own, or one that is joined."""
    if config.ray.address == "local":
        memory = config.ray.object_store_mb
        with local_cluster(name=config.name, num_cpus=num_ranks, object_store_mb=memory) as contact:
            yield contact
    else:
        with joined_cluster(config.ray.address) as contact:
            yield contact
