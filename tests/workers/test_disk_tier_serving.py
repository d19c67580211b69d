"""Two real ranks with int8 experts, of which host memory holds a part: texts, a live move, and a disk that fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.verify import verify
from placement.core import ExpertId, Placement
from placement.errors import ConfigError
from placement.fit.precision import Precision
from placement.migration import plan_migration
from placement.topology import load_topology
from tests.workers.ranks import run_ranks
from workers.events import FAILED, FINISHED
from workers.filling import tiers_on
from workers.loading import fill_slab, load_share
from workers.options import RecorderOptions, WorkerOptions
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
LAYERS, EXPERTS, RANKS, NEW = 8, 32, 2, 12
# 25,088 bytes an expert: room for 59 of the 128 that a rank owns.
OPTIONS = WorkerOptions(
    model=MODEL,
    recorder=RecorderOptions(folder=None),
    expert_precision=Precision.INT8,
    host_slab_gb=0.0015,
    cache_share=0.1,
    kv_pages=64,
)


def _placement(epoch: int, shift: int) -> Placement:
    table = np.full((LAYERS, RANKS, 17), -1, np.int32)
    for expert in range(EXPERTS):
        table[:, (expert + shift) % RANKS, expert // RANKS] = expert
    return Placement(epoch=epoch, num_ranks=RANKS, num_experts=EXPERTS, physical_to_logical=table.reshape(LAYERS, -1))


def serve(rank: int, mail: Any) -> dict[str, Any]:
    topology, base, target = load_topology("2x1"), _placement(0, 0), _placement(1, 1)
    worker = ExpertWorker(OPTIONS, rank=rank, topology=topology, placement=base)
    if rank == 0:
        meeting = worker.open_rendezvous(host="127.0.0.1", interface="lo")
        mail[1].put(meeting)
    else:
        meeting = mail[1].get(timeout=60)
    worker.join(meeting)
    seen: dict[str, Any] = {"before": _answers(worker, rank, "before")}
    for moves in plan_migration(base, target, topology, worker.expert_bytes).rounds:
        worker.copy_round(1, moves)
    worker.prepare(target)
    worker.commit(1)
    while worker.status().epoch != 1:
        time.sleep(0.005)
    worker.drop(1)
    seen["after"] = _answers(worker, rank, "after")
    seen["status"] = worker.status()
    mail[1 - rank].put("answered")
    mail[rank].get(timeout=60)
    if rank == 1:
        # From now on this rank's disk gives nothing: what is not in memory can't be served.
        worker._source.read = _broken  # type: ignore[union-attr, method-assign]
    mail[1 - rank].put("ready")
    mail[rank].get(timeout=60)
    seen["broken"] = _answers(worker, rank, "broken") if rank == 0 else {}
    mail[1 - rank].put("done")
    mail[rank].get(timeout=60)
    seen["lives"] = worker.pulse().serving
    worker.stop()
    return seen


def _broken(expert: ExpertId, out: torch.Tensor) -> None:
    raise OSError("Input/output error")


def _answers(worker: ExpertWorker, rank: int, phase: str) -> dict[str, Any]:
    prompts = {f"{phase}-{rank}-{index}": tuple(range(40 + 3 * index + rank, 60 + 4 * index)) for index in range(4)}
    for name, prompt in prompts.items():
        worker.submit(GenerationRequest(request=name, prompt=prompt, max_new_tokens=NEW))
    ended: dict[str, Any] = {}
    while len(ended) < len(prompts):
        for event in worker.next_events(5.0):
            if event.end is not None:
                ended[event.request] = (prompts[event.request], event.tokens, event.end, event.error)
    return ended


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(serve, RANKS)


@pytest.mark.long
def test_texts_are_those_of_the_quantised_model_before_and_after_a_move(seen: list[dict[str, Any]]) -> None:
    answers = [
        (name, prompt, tokens)
        for each in seen
        for phase in ("before", "after")
        for name, (prompt, tokens, *_) in each[phase].items()
    ]
    verdict = verify(OPTIONS, answers)
    assert (verdict.answers, verdict.tokens) == (16, 16 * NEW)
    assert verdict.wrong == ()


@pytest.mark.long
def test_memory_stays_within_its_budget_and_the_disk_is_read(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        status = each["status"]
        assert status.host_slab_bytes <= 1.5e6
        assert status.experts == LAYERS * EXPERTS // RANKS
        assert status.cache["disk_reads"] > 0
        assert status.cache["disk_bytes"] == status.cache["disk_reads"] * 25_088
        assert status.cache["experts_on_disk"] >= 128 - 59


@pytest.mark.long
def test_a_disk_that_fails_fails_requests_alone_and_both_ranks_serve_on(seen: list[dict[str, Any]]) -> None:
    broken = seen[0]["broken"]
    assert {end for *_, end, _ in broken.values()} <= {FAILED, FINISHED}
    errors = {error for *_, end, error in broken.values() if end == FAILED}
    assert errors
    assert all("an expert that it needs can't be read from disk" in error for error in errors)
    assert all(each["lives"] for each in seen)


def test_a_budget_too_small_is_refused_with_the_sum() -> None:
    _, experts = load_share(OPTIONS, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"host_slab_gb: 0\.000 GB hold 3 experts of 0\.03 MB; at least 24"):
        fill_slab(experts, _placement(0, 0), rank=0, spare=2.0, pin=False, budget_bytes=80_000)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    _, experts = load_share(OPTIONS, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"disk_path '.*gone': no file can be made there: No such file"):
        fill_slab(
            experts, _placement(0, 0), rank=0, spare=2.0, pin=False, budget_bytes=10**6, disk_path=tmp_path / "gone"
        )


def test_the_coldest_tiers_stay_on_disk(tmp_path: Path) -> None:
    _, experts = load_share(OPTIONS, torch.device("cpu"))
    base = _placement(0, 0)
    tiers = np.where(np.arange(RANKS * 17) % 17 < 4, 0, 3).astype(np.uint8)
    placement = Placement(
        epoch=0,
        num_ranks=RANKS,
        num_experts=EXPERTS,
        physical_to_logical=base.physical_to_logical,
        tiers=np.tile(tiers, (LAYERS, 1)),
    )
    slab = fill_slab(experts, placement, rank=0, spare=2.0, pin=False, budget_bytes=40 * 25_088, disk_path=tmp_path)
    hot = {expert for expert, tier in tiers_on(placement, 0).items() if tier == 0}
    assert len(hot) == 32
    assert all(slab.is_ready(expert) for expert in hot)
    assert slab.figures()["experts_on_disk"] == 128 - 40
