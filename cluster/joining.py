"""The road to the placement service of a cluster that runs, for commands beside it. No torch: they start at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle

from cluster.config import ClusterConfig
from cluster.local_ray import SERVICE_NAME, joined_cluster, read_contact
from placement.errors import ConfigError


@contextmanager
def joined_service(config: ClusterConfig) -> Iterator[ActorHandle[Any]]:
    """The placement service of the cluster that serves with this run_dir. Raises ConfigError where none does."""
    contact = read_contact(config.run_dir)
    with joined_cluster(contact.address, contact.token_path):
        try:
            service = ray.get_actor(SERVICE_NAME, namespace=contact.namespace)
        except ValueError as error:
            raise ConfigError(f"the cluster at {contact.address} runs no Moetis service '{config.name}'") from error
        yield service
