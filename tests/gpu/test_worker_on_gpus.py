"""The worker on real GPUs, one rank each, over NCCL: the demo model, served while its experts move."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.verify import verify
from placement.core import Placement
from placement.migration import plan_migration
from placement.topology import load_topology
from tests.workers.ranks import run_ranks
from workers.options import RecorderOptions, WorkerOptions
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
LAYERS, EXPERTS, NEW = 8, 32, 48


def _options(folder: Path | None) -> WorkerOptions:
    return WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=folder), dtype="float32", kv_pages=128)


def _placement(num_ranks: int, epoch: int, shift: int) -> Placement:
    rows = -(-EXPERTS // num_ranks)
    table = np.full((LAYERS, num_ranks, rows), -1, np.int32)
    for expert in range(EXPERTS):
        table[:, (expert + shift) % num_ranks, (expert + shift) // num_ranks % rows] = expert
    return Placement(
        epoch=epoch, num_ranks=num_ranks, num_experts=EXPERTS, physical_to_logical=table.reshape(LAYERS, -1)
    )


def serve_on_gpu(rank: int, mail: Any, folder: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    num_ranks = len(mail)
    topology = load_topology(f"1x{num_ranks}")
    base, target = _placement(num_ranks, 0, 0), _placement(num_ranks, 1, 1)
    worker = ExpertWorker(_options(Path(folder)), rank=rank, topology=topology, placement=base)
    if rank == 0:
        meeting = worker.open_rendezvous(host="127.0.0.1", interface="lo")
        for box in mail[1:]:
            box.put(meeting)
    else:
        meeting = mail[rank].get(timeout=120)
    worker.join(meeting)
    answers = _answers(worker, rank, "before")
    names = _submit(worker, rank, "during")
    for moves in plan_migration(base, target, topology, worker.expert_bytes).rounds:
        if any(rank in (move.source.rank, move.target.rank) for move in moves):
            worker.copy_round(1, moves)
    worker.prepare(target)
    worker.commit(1)
    while worker.status().epoch != 1:
        time.sleep(0.005)
    answers |= _collect(worker, names)
    worker.drop(1)
    start = time.perf_counter()
    answers |= _answers(worker, rank, "after")
    seconds = time.perf_counter() - start
    status = worker.status()
    worker.stop()
    return {"answers": answers, "experts": status.experts, "cache": status.cache, "seconds": seconds}


def _submit(worker: ExpertWorker, rank: int, phase: str) -> dict[str, tuple[int, ...]]:
    prompts = {f"{phase}-{rank}-{index}": tuple(range(40 + 3 * index + rank, 60 + 4 * index)) for index in range(8)}
    for name, prompt in prompts.items():
        worker.submit(GenerationRequest(request=name, prompt=prompt, max_new_tokens=NEW))
    return prompts


def _answers(worker: ExpertWorker, rank: int, phase: str) -> dict[str, Any]:
    return _collect(worker, _submit(worker, rank, phase))


def _collect(worker: ExpertWorker, prompts: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    tokens: dict[str, tuple[int, ...]] = {}
    deadline = time.monotonic() + 120
    while len(tokens) < len(prompts) and time.monotonic() < deadline:
        for event in worker.next_events(1.0):
            assert event.error is None, event.error
            tokens[event.request] = event.tokens
    return {name: (prompts[name], tokens[name]) for name in prompts}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(serve_on_gpu, torch.cuda.device_count(), str(tmp_path_factory.mktemp("trace")))


def test_texts_are_the_plain_models_before_during_and_after_a_move(seen: list[dict[str, Any]]) -> None:
    answers = [(name, *answer) for each in seen for name, answer in each["answers"].items()]
    verdict = verify(_options(None), answers)
    print(f"{verdict}; seconds after: {[each['seconds'] for each in seen]}; cache: {[each['cache'] for each in seen]}")
    assert verdict.answers == 24 * len(seen)
    assert verdict.wrong == ()


def test_each_rank_holds_what_the_new_placement_says(seen: list[dict[str, Any]]) -> None:
    target = _placement(len(seen), 1, 1)
    assert [each["experts"] for each in seen] == [len(target.experts_on(rank)) for rank in range(len(seen))]
