"""Process groups: how the ranks of one cluster find and reach each other, and how a rank breaks off.

Groups of their own, so that no traffic waits for another kind: `data` (the exchange of every layer), `control` (the
agreement before each step), `bulk` (weights that migrate beside the traffic) and `signals` (what two ranks agree on
before weights pass). With GPUs data is NCCL's, and bulk where ranks are on several machines: on one, experts pass
through host memory. All else is gloo's.
A group is founded under an epoch. When a rank is lost the others leave at once, and meet again in new groups, at
another store, under a later epoch: nothing that a lost rank still says can reach them.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from placement.errors import ExchangeError
from workers.group import Group, first_line
from workers.machine import MACHINE_BYTES, machine_id

LOOPBACK = "127.0.0.1"
CHANNELS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: rank 0's store, the interface that gloo binds to, and the epoch that is founded there."""

    host: str
    port: int
    interface: str
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The groups of one rank, founded under epoch. machines: where each rank is (`machine_id`). Where bulk is gloo's it
    takes the signals too."""

    rank: int
    num_ranks: int
    epoch: int
    data: Group
    control: Group
    bulk: Group
    signals: Group
    machines: tuple[bytes, ...]

    def is_near(self, rank: int) -> bool:
        """Whether a rank is on this one's machine."""
        return self.machines[rank] == self.machines[self.rank]

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(dict.fromkeys((self.data, self.control, self.bulk, self.signals)))

    def leave(self) -> None:
        """Leave all groups. Calls of this rank and of its peers that are under way fail."""
        for group in self.groups:
            group.leave()

    @property
    def is_settled(self) -> bool:
        return all(group.is_settled for group in self.groups)


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
    meeting_timeout_s: float | None = None,
    store: TCPStore | None = None,
    apart: bool = False,
) -> Peers:
    """Meet the other ranks and form the groups. Every rank must call this; store is rank 0's own.

    meeting_timeout_s: how long to wait for the others to come, timeout_s unless given. apart: as if each rank were on a
    machine of its own. Raises ExchangeError.
    """
    os.environ["NCCL_SOCKET_IFNAME"] = rendezvous.interface
    # Else torch ends the process when a collective is late; here a rank leaves, and goes on with those that are left.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    patience = timedelta(seconds=timeout_s if meeting_timeout_s is None else meeting_timeout_s)
    try:
        if store is None:
            store = TCPStore(
                rendezvous.host, rendezvous.port, num_ranks, is_master=False, timeout=patience, wait_for_workers=False
            )
        store.set_timeout(patience)

        def found(name: str, on_gpu: bool) -> Group:
            backend = _backend(name, store, rendezvous, rank, num_ranks, patience, on_gpu=on_gpu)
            return Group(backend, timeout_s=timeout_s, is_on_stream=on_gpu)

        groups = {"control": found("control", False), "data": found("data", device.type == "cuda")}
        machines = _machines(groups["control"], rank, num_ranks, apart)
        bulk_on_gpu = device.type == "cuda" and len(set(machines)) > 1
        groups["bulk"] = found("bulk", bulk_on_gpu)
        groups["signals"] = found("signals", False) if bulk_on_gpu else groups["bulk"]
        if bulk_on_gpu:
            groups["bulk"].connect(rank, num_ranks, device)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank} could not meet the other ranks of epoch {rendezvous.epoch} at {rendezvous.host}:"
            f"{rendezvous.port}: {first_line(error)}"
        ) from error
    return Peers(rank=rank, num_ranks=num_ranks, epoch=rendezvous.epoch, machines=machines, **groups)


def _machines(control: Group, rank: int, num_ranks: int, apart: bool) -> tuple[bytes, ...]:
    """Where each rank is."""
    told = torch.zeros((num_ranks, MACHINE_BYTES), dtype=torch.uint8)
    here = rank.to_bytes(MACHINE_BYTES, "big") if apart else machine_id()
    told[rank] = torch.frombuffer(bytearray(here), dtype=torch.uint8)
    control.all_gather(told)
    return tuple(row.numpy().tobytes() for row in told)


def _backend(
    name: str,
    store: TCPStore,
    rendezvous: Rendezvous,
    rank: int,
    num_ranks: int,
    timeout: timedelta,
    *,
    on_gpu: bool,
) -> Any:
    own = PrefixStore(f"{rendezvous.epoch}/{name}", store)
    if on_gpu:
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        if name == "data":
            # Else a reduction takes fewer channels than a plain exchange of the same bytes, and longer.
            nccl.config.min_ctas = nccl.config.max_ctas = CHANNELS
        # Streams of one priority share the GPU's queues: who serves could stand behind a transfer that waits for the
        # other end, and the transfer there behind who serves.
        nccl.is_high_priority_stream = name == "bulk"
        return dist.ProcessGroupNCCL(own, rank, num_ranks, nccl)
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [ProcessGroupGloo.create_device(interface=rendezvous.interface)]
    return ProcessGroupGloo(own, rank, num_ranks, gloo)
