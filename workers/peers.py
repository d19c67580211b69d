"""Process groups: how the ranks of one cluster find and reach each other.

Three groups, so that no traffic waits for another kind: `data` (the exchange of every layer; NCCL when the rank has a
GPU), `control` (the agreement before each step; gloo) and `bulk` (weights that migrate beside the traffic; gloo).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: rank 0's store, and the interface that gloo binds to."""

    host: str
    port: int
    interface: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    rank: int
    num_ranks: int
    data: dist.ProcessGroup
    control: dist.ProcessGroup
    bulk: dist.ProcessGroup


def open_store(*, host: str, num_ranks: int, timeout_s: float) -> TCPStore:
    """Rank 0's store, listening on host alone and on a port that the system picks."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        num_ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join(
    rendezvous: Rendezvous,
    *,
    rank: int,
    num_ranks: int,
    device: torch.device,
    timeout_s: float,
    store: TCPStore | None = None,
) -> Peers:
    """Meet the other ranks and form the three groups. Every rank must call this; store is rank 0's own."""
    os.environ["GLOO_SOCKET_IFNAME"] = rendezvous.interface
    os.environ["NCCL_SOCKET_IFNAME"] = rendezvous.interface
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = TCPStore(rendezvous.host, rendezvous.port, num_ranks, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Peers(
        rank=rank,
        num_ranks=num_ranks,
        data=dist.new_group(backend=backend, timeout=timeout),
        control=dist.new_group(backend="gloo", timeout=timeout),
        bulk=dist.new_group(backend="gloo", timeout=timeout),
    )


def leave() -> None:
    """Take the groups down. The other ranks' calls in flight fail."""
    if dist.is_initialized():
        dist.destroy_process_group()
