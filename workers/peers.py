"""Process groups: how the ranks of one cluster find and reach each other, and how a rank breaks off.

Three groups, so that no traffic waits for another kind: `data` (the exchange of every layer), `control` (the agreement
before each step) and `bulk` (weights that migrate beside the traffic). Data and bulk are NCCL's when the rank has a
GPU, all else is gloo's.
A group is founded under an epoch. When a rank is lost the others leave at once, and meet again in new groups, at
another store, under a later epoch: nothing that a lost rank still says can reach them.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from placement.errors import ExchangeError

LOOPBACK = "127.0.0.1"
# How long a rank waits before it looks whether it is to leave. Nothing is lost by waiting again.
_LOOK_UP = timedelta(seconds=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: rank 0's store, the interface that gloo binds to, and the epoch that is founded there."""

    host: str
    port: int
    interface: str
    epoch: int = 0


class Group:
    """One process group of this rank. Its calls wait for the peers, and fail with ExchangeError once one is lost, one
    has left, or this rank itself leaves from another thread.

    is_on_stream: calls return at once and the GPU's stream waits, as with NCCL; to leave aborts what it waits for.
    waiting and moved_at (time.monotonic) say whether a call waits now, and when the last one began or ended.
    """

    def __init__(self, backend: Any, *, timeout_s: float, is_on_stream: bool = False) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._is_on_stream = is_on_stream
        self._left = threading.Event()
        self._unfinished: list[Callable[[], bool]] = []
        self.waiting = False
        self.moved_at = time.monotonic()

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """In place: the largest of all ranks' values."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._finish(lambda: self._backend.allreduce([tensor], options))

    def all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int] | None, sent: list[int] | None
    ) -> None:
        """Rows of outgoing to each rank, sent[rank] of them (equal shares where None)."""
        self._finish(
            lambda: self._backend.alltoall_base(incoming, outgoing, received or [], sent or [], dist.AllToAllOptions())
        )

    def all_gather(self, gathered: list[torch.Tensor], mine: list[torch.Tensor]) -> None:
        """The rows of all ranks, in rank order, of several tensors at once; mine may lie in its place there."""
        if self._is_on_stream:
            self._finish(lambda: self._gather_as_one(gathered, mine))
            return
        for into, own in zip(gathered, mine, strict=True):
            self._finish(functools.partial(self._backend._allgather_base, into, own, AllgatherOptions()))

    def _gather_as_one(self, gathered: list[torch.Tensor], mine: list[torch.Tensor]) -> Any:
        """One launch for all of them."""
        self._backend._start_coalescing()
        for into, own in zip(gathered, mine, strict=True):
            self._backend._allgather_base(into, own, AllgatherOptions())
        return self._backend._end_coalescing()

    def reduce_scatter(self, mine: torch.Tensor, summands: torch.Tensor) -> None:
        """This rank's share of the rows, each the sum of all ranks' rows at that place."""
        self._finish(lambda: self._backend._reduce_scatter_base(mine, summands, dist.ReduceScatterOptions()))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """One call of send or receive at a time."""
        self._pass(lambda: self._backend.send([tensor], rank, 0))

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._pass(lambda: self._backend.recv([tensor], rank, 0))

    def leave(self) -> None:
        """Break off what waits here; every later call fails."""
        self._left.set()
        if hasattr(self._backend, "abort"):
            self._backend.abort()

    @property
    def has_left(self) -> bool:
        return self._left.is_set()

    def check(self) -> None:
        """Raises ExchangeError once this rank has left: what NCCL was broken off in holds nothing that may be used."""
        if self._left.is_set():
            raise ExchangeError("this rank has left the group")

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way any more. Until then the group must be kept: to take it down would block."""
        return all(is_done() for is_done in self._unfinished)

    def _finish(self, start: Callable[[], Any]) -> None:
        self.check()
        self.moved_at, self.waiting = time.monotonic(), True
        deadline = self.moved_at + self._timeout_s
        try:
            work = start()
            while not self._waited(work):
                if self._left.is_set() or time.monotonic() > deadline:
                    self._unfinished.append(work.is_completed)
                    reason = "this rank has left the group" if self._left.is_set() else "the peers do not answer"
                    raise ExchangeError(reason)
        except RuntimeError as error:
            raise ExchangeError(_first_line(error)) from error
        finally:
            self.moved_at, self.waiting = time.monotonic(), False

    def _pass(self, start: Callable[[], Any]) -> None:
        """A transfer between two ranks. Gloo closes a pair when a wait for it times out, and can't break one off, so a
        thread waits for it to the end, and is left to itself where this rank leaves."""
        if self._is_on_stream:
            self._finish(start)
            return
        self.check()
        outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

        def wait() -> None:
            try:
                start().wait(timedelta(seconds=self._timeout_s))
                outcome.put(None)
            except RuntimeError as error:
                outcome.put(error)

        thread = threading.Thread(target=wait, name="transfer", daemon=True)
        thread.start()
        while True:
            try:
                error = outcome.get(timeout=_LOOK_UP.total_seconds())
                break
            except queue.Empty:
                if self._left.is_set():
                    self._unfinished.append(lambda: not thread.is_alive())
                    raise ExchangeError("this rank has left the group") from None
        if error is not None:
            raise ExchangeError(_first_line(error)) from error

    def _waited(self, work: Any) -> bool:
        if self._is_on_stream:
            # With a timeout, NCCL would block this thread too, and abort when it is over.
            work.wait()
            return True
        try:
            work.wait(_LOOK_UP)
        except RuntimeError:
            if not work.is_completed():
                return False
            # It failed, or it ended just after the wait for it did: it tells which.
            work.wait(_LOOK_UP)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The groups of one rank, founded under epoch."""

    rank: int
    num_ranks: int
    epoch: int
    data: Group
    control: Group
    bulk: Group

    @property
    def groups(self) -> tuple[Group, Group, Group]:
        return self.data, self.control, self.bulk

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
) -> Peers:
    """Meet the other ranks and form the three groups. Every rank must call this; store is rank 0's own.

    meeting_timeout_s: how long to wait for the others to come, timeout_s unless given. Raises ExchangeError.
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
        backends = {
            name: _backend(name, store, rendezvous, rank, num_ranks, patience, device)
            for name in ("control", "bulk", "data")
        }
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank} could not meet the other ranks of epoch {rendezvous.epoch} at {rendezvous.host}:"
            f"{rendezvous.port}: {_first_line(error)}"
        ) from error
    groups = {
        name: Group(backend, timeout_s=timeout_s, is_on_stream=name != "control" and device.type == "cuda")
        for name, backend in backends.items()
    }
    return Peers(rank=rank, num_ranks=num_ranks, epoch=rendezvous.epoch, **groups)


def _backend(
    name: str,
    store: TCPStore,
    rendezvous: Rendezvous,
    rank: int,
    num_ranks: int,
    timeout: timedelta,
    device: torch.device,
) -> Any:
    own = PrefixStore(f"{rendezvous.epoch}/{name}", store)
    if name != "control" and device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(own, rank, num_ranks, nccl)
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [ProcessGroupGloo.create_device(interface=rendezvous.interface)]
    return ProcessGroupGloo(own, rank, num_ranks, gloo)


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
