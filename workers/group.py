"""One process group of a rank: calls that wait for the peers, and can be broken off."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from placement.errors import ExchangeError

# How long a rank waits before it looks whether it is to leave. Nothing is lost by waiting again.
_LOOK_UP = timedelta(seconds=0.2)
_Outcome = queue.SimpleQueue[RuntimeError | None]


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
        self._transfers = _Transfers(timeout_s)
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

    def all_gather(self, rows: torch.Tensor) -> None:
        """In place: every rank's share of the rows, in rank order; this rank's own are there."""
        size, rank = self._backend.size(), self._backend.rank()
        shares = list(torch.chunk(rows, size))
        if not self._is_on_stream:
            self._finish(lambda: self._backend._allgather_base(rows, shares[rank], AllgatherOptions()))
            return
        # Each sends to each: NCCL's own all-gather is a ring, which took up to 1.4 times as long over NVLink.
        nothing = rows[:0]
        given = [nothing if other == rank else shares[rank] for other in range(size)]
        taken = [nothing if other == rank else share for other, share in enumerate(shares)]
        self._finish(lambda: self._backend.alltoall(taken, given, dist.AllToAllOptions()))

    def _as_one(self, calls: Callable[[], None]) -> Any:
        """One launch for all of NCCL's calls. They use the connections of the whole group; single sends would found
        a group for each pair of ranks."""
        self._backend._start_coalescing()
        calls()
        return self._backend._end_coalescing()

    def reduce_scatter(self, mine: torch.Tensor, summands: torch.Tensor) -> None:
        """This rank's share of the rows, each the sum of all ranks' rows at that place."""
        self._finish(lambda: self._backend._reduce_scatter_base(mine, summands, dist.ReduceScatterOptions()))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """One call of send or receive at a time."""
        self._pass(lambda: self._backend.send([tensor], rank, 0))

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._pass(lambda: self._backend.recv([tensor], rank, 0))

    def connect(self, rank: int, num_ranks: int, device: torch.device) -> None:
        """Send a byte to every other rank and get one.

        NCCL connects two ranks when they first talk, and waits for all of the GPU's work then: beside a collective of
        another group it would hang.
        """
        others = [other for other in range(num_ranks) if other != rank]
        if not others:
            return
        boxes = torch.zeros((2, num_ranks), dtype=torch.uint8, device=device)

        def talk() -> None:
            for other in others:
                self._backend.send([boxes[0, other]], other, 0)
                self._backend.recv([boxes[1, other]], other, 0)

        self._finish(lambda: self._as_one(talk))
        torch.cuda.synchronize(device)

    def leave(self) -> None:
        """Break off what waits here; every later call fails."""
        self._left.set()
        self._transfers.end()
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
            raise ExchangeError(first_line(error)) from error
        finally:
            self.moved_at, self.waiting = time.monotonic(), False

    def _pass(self, start: Callable[[], Any]) -> None:
        """A transfer between two ranks. Gloo closes a pair when a wait for it times out, and can't break one off, so a
        thread waits for it to the end, and is left to itself where this rank leaves."""
        if self._is_on_stream:
            self._finish(lambda: self._as_one(start))
            return
        outcome = self._transfers.begin(start)
        while True:
            try:
                error = outcome.get(timeout=_LOOK_UP.total_seconds())
                break
            except queue.Empty:
                if self._left.is_set():
                    self._unfinished.append(lambda: not outcome.empty())
                    raise ExchangeError("this rank has left the group") from None
        if error is not None:
            raise ExchangeError(first_line(error)) from error

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


class _Transfers:
    """A thread that waits for one transfer after another, from the first one on: a new one for each takes longer than
    the transfer of a few bytes."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], _Outcome] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def begin(self, start: Callable[[], Any]) -> _Outcome:
        """Where its outcome will be: None, or what went wrong."""
        outcome: _Outcome = queue.SimpleQueue()
        with self._lock:
            if self._ended:
                raise ExchangeError("this rank has left the group")
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="transfers", daemon=True)
                self._thread.start()
            self._asked.put((start, outcome))
        return outcome

    def end(self) -> None:
        """Begin none any more. The thread ends after the one that it waits for."""
        with self._lock:
            self._ended = True
            self._asked.put(None)

    def _wait(self) -> None:
        while (asked := self._asked.get()) is not None:
            start, outcome = asked
            try:
                start().wait(self._timeout)
                outcome.put(None)
            except RuntimeError as error:
                outcome.put(error)
            # Until the next one it keeps nothing of this one: neither the tensor nor the group.
            del asked, start, outcome


def first_line(error: RuntimeError) -> str:
    """What went wrong, without the stack that torch adds."""
    return (str(error).splitlines() or [repr(error)])[0]
