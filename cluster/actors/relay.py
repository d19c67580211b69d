"""The gateway's relay as a Ray actor."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle

from cluster.actors.nearby import on_this_node
from cluster.gateway.relay import Relay


def start_relay(*, max_requests: int, max_tokens: int) -> ActorHandle[Any]:
    """The gateway's relay. One that dies comes back empty: what was under way ends, and new requests are served."""
    remote = ray.remote(Relay).options(
        num_cpus=0, max_concurrency=1000, max_restarts=-1, scheduling_strategy=on_this_node()
    )
    return remote.remote(max_requests=max_requests, max_tokens=max_tokens)
