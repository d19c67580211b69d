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


@dataclass(frozen=True, slots=True)
class Premises:
    """A run dir of one's own and a Ray cluster that runs. Nobody serves yet."""

    config: ClusterConfig
    topology: Topology
    contact: Contact
    notes: Notes

    @contextmanager
    def staffed(self, failed: Callable[[MoetisError], None]) -> Iterator[Cluster]:
        """Workers serve until the context ends. failed is told, once, what ended the service for good."""
        config = self.config
        with (
            Fleet(config, note=self.notes, failed=failed) as fleet,
            Meter(fleet.status, history_path(config)),
        ):
            yield Cluster(config, self.topology, self.contact, self.notes, fleet)


@contextmanager
def opened(config: ClusterConfig) -> Iterator[Premises]:
    """The run dir and Ray; both end with the context, or are left."""
    topology = load_topology(config.topology)
    with (
        held(config.run_dir),
        _ray(config, topology.num_ranks) as contact,
        LOG.status("starting ...") as status,
    ):
        yield Premises(config, topology, contact, Notes(status))


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
