"""`moetis serve --http`: the fleet, the relay and the gateway, from start to end."""

from __future__ import annotations

import queue
from contextlib import nullcontext

from cluster.actors.relay import start_relay
from cluster.config import ClusterConfig, history_path
from cluster.fleet import Fleet
from cluster.gateway.deploy import Address, check_address, gateway, gateway_settings
from cluster.gateway.front import Front, Inbox
from cluster.local_ray import write_contact
from cluster.meter import Meter
from cluster.rundir import held
from cluster.serve import open_ray
from cluster.terminal import LOG, Notes
from placement.topology import load_topology


def run_gateway(config: ClusterConfig, address: Address) -> None:
    """Serve over HTTP until a signal, or until the fleet fails, which is raised as MoetisError."""
    settings = gateway_settings(config)
    check_address(address, with_keys=bool(settings.key_hashes))
    topology = load_topology(config.topology)
    inbox: Inbox = queue.SimpleQueue()
    with (
        held(config.run_dir),
        open_ray(config, topology.num_ranks) as contact,
        LOG.status("starting ...") as status,
        nullcontext(Notes(status)) as notes,
        Fleet(config, note=notes, failed=inbox.put) as fleet,
        Meter(fleet.status, history_path(config)),
    ):
        status.update("starting the gateway ...")
        relay = start_relay(max_requests=config.gateway.max_requests, max_tokens=config.gateway.max_tokens)
        with gateway(config, settings, relay, address):
            path = write_contact(config.run_dir, contact)
            try:
                notes.up(f"{topology.num_ranks} ranks serve '{settings.model}' at http://{address}/v1")
                Front(fleet, relay, topology, inbox, trace_dir=config.trace_dir).run()
            finally:
                path.unlink(missing_ok=True)
