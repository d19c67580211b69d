"""`moetis rebalance`: ask the placement service of a running cluster to plan and enact."""

from __future__ import annotations

import ray

from cluster.actors import SERVICE_NAME
from cluster.config import ClusterConfig
from cluster.fleet import answer
from cluster.local_ray import joined_cluster, read_contact
from cluster.service import RebalanceResult
from placement.errors import ConfigError


def run_rebalance(config: ClusterConfig) -> RebalanceResult:
    """Join the cluster that serves with this run_dir, and rebalance it. Raises ConfigError where none does."""
    contact = read_contact(config.run_dir)
    with joined_cluster(contact.address, contact.token_path):
        try:
            service = ray.get_actor(SERVICE_NAME, namespace=contact.namespace)
        except ValueError as error:
            raise ConfigError(f"the cluster at {contact.address} runs no Moetis service '{config.name}'") from error
        result: RebalanceResult = answer(service.rebalance.remote())
        return result
