"""Run one function in several real processes, one a rank, and bring their answers back."""

from __future__ import annotations

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 180


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """function(rank, exchange, *arguments) in each process -> its results by rank.

    exchange is a list of queues, one a rank, with which the ranks can pass things to each other.
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
        for _ in range(num_ranks):
            rank, failure, result = answers.get(timeout=TIMEOUT_S)
            assert failure is None, f"rank {rank}:\n{failure}"
            results[rank] = result
    except queue.Empty:
        raise AssertionError(f"only ranks {sorted(results)} of {num_ranks} answered") from None
    finally:
        for process in processes:
            process.join(timeout=10 if len(results) == num_ranks else 0)
            process.kill()
    return [results[rank] for rank in range(num_ranks)]


def _run(function: Callable[..., Any], rank: int, mail: Any, answers: Any, arguments: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        answers.put((rank, None, function(rank, mail, *arguments)))
    except BaseException:  # noqa: BLE001  (the parent raises it)
        answers.put((rank, traceback.format_exc(), None))
