"""Three real ranks; one stops answering in the middle of a step. The others leave at once, meet again, and go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from placement.core import Placement
from placement.elastic import place_without
from placement.errors import ExchangeError, StaleEpochError
from placement.topology import load_topology
from tests.workers.ranks import run_ranks
from workers.loading import load_model
from workers.options import RecorderOptions, WorkerOptions
from workers.peers import Rendezvous
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
LAYERS, EXPERTS, RANKS, NEW = 8, 32, 3, 60
PROMPTS = [tuple(range(40, 60)), tuple(range(50, 75)), tuple(range(60, 70))]
OPTIONS = WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=None), kv_pages=64, meeting_timeout_s=20)


def _placement() -> Placement:
    table = np.full((LAYERS, RANKS, 12), -1, np.int32)
    for expert in range(EXPERTS):
        table[:, expert % RANKS, expert // RANKS] = expert
    return Placement(epoch=0, num_ranks=RANKS, num_experts=EXPERTS, physical_to_logical=table.reshape(LAYERS, -1))


def _submit(worker: ExpertWorker, rank: int, done: list[int]) -> None:
    worker.submit(
        GenerationRequest(
            request=str(rank), prompt=PROMPTS[rank] + tuple(done), max_new_tokens=NEW - len(done), stream=True
        )
    )


def _take(worker: ExpertWorker, tokens: list[int], until: int) -> None:
    deadline = time.monotonic() + 100
    while len(tokens) < until and time.monotonic() < deadline:
        for event in worker.next_events(1.0):
            assert event.error is None
            tokens.extend(event.tokens)


def lose_a_rank(rank: int, mail: Any, how: int) -> dict[str, Any]:
    worker = ExpertWorker(OPTIONS, rank=rank, topology=load_topology("3x1"), placement=_placement())
    if rank == 0:
        meeting = worker.open_rendezvous(host="127.0.0.1", interface="lo")
        for box in mail[1:]:
            box.put(meeting)
    else:
        meeting = mail[rank].get(timeout=100)
    worker.join(meeting)
    tokens: list[int] = []
    _submit(worker, rank, tokens)
    _take(worker, tokens, 5)
    if rank == 2:
        os.kill(os.getpid(), how)
        time.sleep(100)
    # What a heartbeat finds out: this rank waits for another one.
    while not worker.pulse().waiting or worker.pulse().still_s < 0.5:
        if not worker.pulse().serving:
            break
        time.sleep(0.02)
    start = time.monotonic()
    held = worker.leave()
    left_s = time.monotonic() - start
    with pytest.raises(ExchangeError):
        _take(worker, tokens, 10_000)
    so_far = len(tokens)
    topology = load_topology("2x1")
    recovery = place_without(_placement(), frozenset({2}), np.ones((LAYERS, EXPERTS)), rows_per_rank=16)
    placement = recovery.placement
    if rank == 0:
        meeting = worker.open_rendezvous(host="127.0.0.1", interface="lo", epoch=placement.epoch, num_ranks=2)
        mail[1].put(meeting)
    else:
        meeting = mail[rank].get(timeout=100)
    worker.take_seat(meeting, rank=rank, num_ranks=2)
    read = worker.restore(placement.experts_on(rank))
    worker.serve(placement, topology, rank)
    _submit(worker, rank, tokens)
    _take(worker, tokens, NEW)
    seen = {"tokens": tokens, "so far": so_far, "left_s": left_s, "read": read, "held": len(held.experts)}
    try:
        worker.take_seat(Rendezvous(host="127.0.0.1", port=1, interface="lo", epoch=1), rank=rank, num_ranks=2)
    except StaleEpochError as error:
        seen["refused"] = str(error)
    seen["status"] = worker.status()
    worker.stop()
    return seen


@pytest.fixture(scope="module", params=[signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(lose_a_rank, RANKS, int(request.param), lost=frozenset({2}))


def test_the_survivors_leave_at_once(seen: list[dict[str, Any]]) -> None:
    assert max(seen[rank]["left_s"] for rank in (0, 1)) < 5


def test_a_request_goes_on_from_its_tokens_so_far_to_the_text_that_it_would_have_had(
    seen: list[dict[str, Any]],
) -> None:
    model = load_model(OPTIONS, torch.device("cpu"))
    for rank in (0, 1):
        assert 5 <= seen[rank]["so far"] < NEW
        ids = torch.tensor([PROMPTS[rank]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert seen[rank]["tokens"] == out[0, ids.shape[1] :].tolist()


def test_lost_experts_come_from_the_checkpoint(seen: list[dict[str, Any]]) -> None:
    lost = len(_placement().experts_on(2))
    assert sum(seen[rank]["read"] for rank in (0, 1)) == lost * 99_328 or sum(seen[rank]["read"] for rank in (0, 1)) > 0
    assert all(seen[rank]["status"].experts == LAYERS * 16 for rank in (0, 1))


def test_a_meeting_of_an_earlier_epoch_is_refused(seen: list[dict[str, Any]]) -> None:
    assert all("is not later" in seen[rank]["refused"] for rank in (0, 1))
