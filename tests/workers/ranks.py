"""Run one function in several real processes, one a rank, and bring their answers back."""

from __future__ import annotations

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from workers import peers

TIMEOUT_S = 180
CPU = torch.device("cpu")


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, lost: frozenset[int] = frozenset()
) -> list[Any]:
    """function(rank, exchange, *arguments) in each process -> its results by rank.

    exchange is a list of queues, one a rank, with which the ranks can pass things to each other. lost: ranks that stop
    or die on the way; they have no result.
    """
    context = multiprocessing.get_context("spawn")
    mail = [context.Queue() for _ in range(num_ranks)]
    answers = context.Queue()
    processes = [
        context.Process(target=_run, args=(function, rank, mail, answers, arguments), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in range(num_ranks - len(lost)):
            rank, failure, result = answers.get(timeout=TIMEOUT_S)
            assert failure is None, f"rank {rank}:\n{failure}"
            results[rank] = result
    except queue.Empty:
        raise AssertionError(f"only ranks {sorted(results)} of {num_ranks} answered") from None
    finally:
        for process in processes:
            process.join(timeout=10 if len(results) == num_ranks else 0)
            process.kill()
    return [results.get(rank) for rank in range(num_ranks)]


def meet(rank: int, mail: Any, device: torch.device = CPU, *, apart: bool = False) -> peers.Peers:
    """The process groups of all ranks, on loopback."""
    torch.set_num_threads(1)
    num_ranks = len(mail)
    store = None
    if rank == 0:
        store = peers.open_store(host=peers.LOOPBACK, num_ranks=num_ranks, timeout_s=60)
        meeting = peers.Rendezvous(host=peers.LOOPBACK, port=store.port, interface="lo")
        for box in mail[1:]:
            box.put(meeting)
    else:
        meeting = mail[rank].get(timeout=60)
    return peers.join(meeting, rank=rank, num_ranks=num_ranks, device=device, timeout_s=60, store=store, apart=apart)


def meet_in_threads(num_ranks: int, *, epoch: int) -> list[peers.Peers]:
    """The process groups of ranks that are threads of this process."""
    store = peers.open_store(host=peers.LOOPBACK, num_ranks=num_ranks, timeout_s=20)
    meeting = peers.Rendezvous(host=peers.LOOPBACK, port=store.port, interface="lo", epoch=epoch)

    def join(rank: int) -> peers.Peers:
        own = store if rank == 0 else None
        return peers.join(meeting, rank=rank, num_ranks=num_ranks, device=CPU, timeout_s=20, store=own)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(join, range(num_ranks)))


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Future[Any], Future[Any]]:
    """Two calls at the same time, ended."""
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(first), pool.submit(second)


def _run(function: Callable[..., Any], rank: int, mail: Any, answers: Any, arguments: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        answers.put((rank, None, function(rank, mail, *arguments)))
    except BaseException:  # noqa: BLE001  (the parent raises it)
        answers.put((rank, traceback.format_exc(), None))
