"""`moetis serve --http`: the fleet, the relay and the gateway, from start to end."""

from __future__ import annotations

import queue

from cluster.actors.relay import start_relay
from cluster.config import ClusterConfig
from cluster.gateway.deploy import Address, check_address, gateway, gateway_settings
from cluster.gateway.front import Front, Inbox
from cluster.opening import opened


def run_gateway(config: ClusterConfig, address: Address) -> None:
    """Serve over HTTP until a signal, or until the fleet fails, which is raised as MoetisError."""
    settings = gateway_settings(config)
    check_address(address, with_keys=bool(settings.key_hashes))
    inbox: Inbox = queue.SimpleQueue()
    with opened(config) as premises:
        premises.notes("starting the gateway")
        relay = start_relay(max_requests=config.gateway.max_requests, max_tokens=config.gateway.max_tokens)
        ranks = premises.topology.num_ranks
        # The gateway first: while workers load, clients are told that they do.
        with (
            gateway(config, settings, relay, address),
            premises.staffed(inbox.put) as cluster,
            cluster.announced(f"{ranks} ranks serve '{settings.model}' at http://{address}/v1"),
        ):
            Front(cluster.fleet, relay, cluster.topology, inbox, trace_dir=config.trace_dir).run()
