"""The ranks of the bench: bare processes with the workers' own process groups, a clock, and a list of figures."""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers import peers
from workers.group import Group

TIMEOUT_S = 550
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told. cases: what `make_cases` gave. before: an older workers/exchange.py."""

    num_ranks: int
    tiny: bool
    stages: tuple[str, ...]
    cases: Any = None
    before: Path | None = None


class Crew:
    """One rank's side. epochs: how often the ranks have met."""

    def __init__(self, rank: int, mail: list[Any], job: Job) -> None:
        self.rank = rank
        self.job = job
        self.mail = mail
        self.num_ranks = job.num_ranks
        self.cuda = not job.tiny
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.rows: list[dict[str, Any]] = []
        # What CUDA has registered must live on: it refuses a new range at the same address.
        self.keep: list[Any] = []
        self._met = 0
        # As workers have it: with more, a thread pool a rank is in the other's way.
        torch.set_num_threads(1)
        if self.cuda:
            torch.cuda.set_device(rank)

    def meet(
        self, *, rank: int | None = None, num_ranks: int | None = None, cpu: bool = False, apart: bool = False
    ) -> peers.Peers:
        """Form groups anew, under the next epoch; by default with everyone, over NCCL where there are GPUs.

        apart: as if every rank were on a machine of its own.
        """
        rank = self.rank if rank is None else rank
        num_ranks = self.num_ranks if num_ranks is None else num_ranks
        epoch, self._met = self._met, self._met + 1
        store = None
        if rank == 0:
            store = peers.open_store(host=peers.LOOPBACK, num_ranks=num_ranks, timeout_s=120)
            meeting = peers.Rendezvous(host=peers.LOOPBACK, port=store.port, interface="lo", epoch=epoch)
            for box in self.mail[1:num_ranks]:
                box.put(meeting)
        else:
            meeting = self.mail[rank].get(timeout=120)
        self._store = store
        device = torch.device("cpu") if cpu else self.device
        return peers.join(
            meeting, rank=rank, num_ranks=num_ranks, device=device, timeout_s=120, store=store, apart=apart
        )

    def note(self, what: str, **figures: Any) -> None:
        """A row of figures, printed by rank 0."""
        self.rows.append({"what": what, **figures})
        if self.rank == 0:
            shown = "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
            )
            print(f"{what:<28} {shown}", flush=True)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def slowest(control: Group, value: float) -> float:
    """The largest of all ranks' values; a barrier too."""
    box = torch.tensor([value], dtype=torch.float64)
    control.all_reduce_max(box)
    return float(box[0])


def seconds_of(crew: Crew, control: Group, work: Callable[[], Any], times: int) -> float:
    """Median seconds of one call of work, called back to back, of the slowest rank."""
    work()
    found = []
    for _ in range(REPEATS):
        crew.sync()
        slowest(control, 0.0)
        begun = time.perf_counter()
        for _ in range(times):
            work()
        crew.sync()
        found.append(slowest(control, (time.perf_counter() - begun) / times))
    return statistics.median(found)


def run_crew(stages: Callable[[Crew], None], job: Job) -> list[dict[str, Any]]:
    """Run stages(crew) in a process a rank. Returns rank 0's rows. A rank that kills itself is no failure."""
    context = multiprocessing.get_context("spawn")
    mail = [context.Queue() for _ in range(job.num_ranks)]
    answers = context.Queue()
    processes = [
        context.Process(target=_live, args=(stages, rank, mail, answers, job), daemon=True)
        for rank in range(job.num_ranks)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes[1:], start=1):
        threading.Thread(target=_tell_if_lost, args=(process, rank, mail), daemon=True).start()
    try:
        rank, failure, rows = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        raise SystemExit("the ranks do not answer") from None
    finally:
        for process in processes:
            process.join(timeout=0.5)
            process.kill()
    if failure is not None:
        print(f"rank {rank}:\n{failure}", file=sys.stderr)
        return [*rows, {"what": f"rank {rank} failed", "error": failure.splitlines()[-1], "equal": False}]
    return list(rows)


def _tell_if_lost(process: Any, rank: int, mail: list[Any]) -> None:
    process.join()
    for box in mail[:rank]:
        box.put("lost")


def _live(stages: Callable[[Crew], None], rank: int, mail: list[Any], answers: Any, job: Job) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    # Queues of commands enough, so that no stream waits behind another's collective.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    crew = Crew(rank, mail, job)
    try:
        stages(crew)
        if rank == 0:
            answers.put((rank, None, crew.rows))
        else:
            # Rank 0 still reads what this process owns.
            time.sleep(TIMEOUT_S)
    except BaseException:  # noqa: BLE001  (the parent raises it)
        answers.put((rank, traceback.format_exc(), crew.rows))
        time.sleep(5)
