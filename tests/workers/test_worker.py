"""Three real ranks serve the demo model over gloo: texts, refusals, cancelling, and a change of epoch under way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from placement.core import Placement
from placement.errors import MigrationError, RequestError, StaleEpochError
from placement.migration import plan_migration
from placement.topology import load_topology
from placement.trace import load_trace
from tests.workers.ranks import run_ranks
from workers.events import CANCELLED, FAILED, FINISHED
from workers.loading import load_model
from workers.options import RecorderOptions, WorkerOptions
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
LAYERS, EXPERTS, RANKS = 8, 32, 3
PROMPT = tuple(range(40, 60))
NEW = 24


def _placement(epoch: int, shift: int) -> Placement:
    """Experts dealt out in turn, from `shift` on; 12 rows a rank, so that some are empty."""
    table = np.full((LAYERS, RANKS, 12), -1, np.int32)
    for expert in range(EXPERTS):
        table[:, (expert + shift) % RANKS, (expert + shift) // RANKS % 12] = expert
    return Placement(epoch=epoch, num_ranks=RANKS, num_experts=EXPERTS, physical_to_logical=table.reshape(LAYERS, -1))


BASE, NEXT, AFTER_THAT = _placement(0, 0), _placement(1, 1), _placement(2, 2)


def _options(folder: str) -> WorkerOptions:
    return WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=Path(folder)), peer_timeout_s=60, kv_pages=64)


def serve(rank: int, mail: Any, folder: str) -> dict[str, Any]:
    """Everything that one rank lives through; what it saw, for the tests to judge."""
    worker = ExpertWorker(_options(folder), rank=rank, topology=load_topology("3x1"), placement=BASE)
    if rank == 0:
        meeting = worker.open_rendezvous(host="127.0.0.1", interface="lo")
        for box in mail[1:]:
            box.put(meeting)
    else:
        meeting = mail[rank].get(timeout=60)
    worker.join(meeting)
    seen: dict[str, Any] = {}
    if rank < 2:
        # Rank 2 stays without requests all along.
        seen["answers"] = _answers(worker, [str(10 * rank + index) for index in range(3)])
        seen["refusals"] = _refusals(worker)
        seen["cancelled"] = _cancelled(worker)
        seen["failed"] = _failed(worker) if rank == 1 else _answers(worker, ["beside"])
    _meet(mail, rank)
    seen["early"] = _migrate(worker, rank, mail, NEXT, commit=False)
    worker.submit(_request("held", PROMPT, NEW, stream=True))
    seen["aborted to"] = worker.abort(1)
    _meet(mail, rank)
    seen["moved"] = _migrate(worker, rank, mail, AFTER_THAT, commit=True)
    seen["text across the move"] = _collect(worker, {"held"})["held"]
    _meet(mail, rank)
    seen["dropped"] = worker.drop(2)
    seen["stale"] = _stale(worker)
    seen["status"] = worker.status()
    if rank < 2:
        seen["after"] = _answers(worker, [f"after-{rank}"])
    worker.stop()
    seen["clock"] = worker.recent_steps()
    return seen


def _meet(mail: Any, rank: int) -> None:
    """A barrier of the test's own, so that the ranks are at one place."""
    for other in range(RANKS):
        if other != rank:
            mail[other].put(None)
    for _ in range(RANKS - 1):
        mail[rank].get(timeout=120)


def _request(name: str, prompt: tuple[int, ...], new: int, stream: bool = False) -> GenerationRequest:
    return GenerationRequest(request=name, prompt=prompt, max_new_tokens=new, stream=stream)


def _collect(worker: ExpertWorker, names: set[str]) -> dict[str, Any]:
    tokens: dict[str, list[int]] = {name: [] for name in names}
    ends: dict[str, str] = {}
    num_events = 0
    deadline = time.monotonic() + 120
    while len(ends) < len(names) and time.monotonic() < deadline:
        for event in worker.next_events(1.0):
            num_events += 1
            tokens[event.request].extend(event.tokens)
            if event.end is not None:
                ends[event.request] = event.end
    return {name: (tokens[name], ends[name], num_events) for name in names}


def _answers(worker: ExpertWorker, names: list[str]) -> dict[str, Any]:
    for index, name in enumerate(names):
        worker.submit(_request(name, PROMPT[index:], NEW, stream=index == 0))
    return _collect(worker, set(names))


def _refusals(worker: ExpertWorker) -> list[str]:
    wrong = [
        _request("empty", (), NEW),
        _request("foreign", (0, 6144), NEW),
        _request("none", PROMPT, 0),
        _request("long", PROMPT, 5000),
    ]
    found = []
    for request in wrong:
        try:
            worker.submit(request)
        except RequestError as error:
            found.append(str(error))
    return found


def _cancelled(worker: ExpertWorker) -> tuple[Any, Any]:
    worker.submit(_request("again", PROMPT, 400))
    worker.cancel("again")
    first = _collect(worker, {"again"})["again"]
    worker.submit(_request("again", PROMPT, NEW))
    return first, _collect(worker, {"again"})["again"]


def _failed(worker: ExpertWorker) -> tuple[Any, Any]:
    """A forward that breaks in the fourth layer, once; then the same request again."""
    attention = worker._parallel.model.model.layers[3].self_attn

    def break_once(module: Any, inputs: Any) -> None:
        hook.remove()
        raise RuntimeError("the fourth layer broke")

    hook = attention.register_forward_pre_hook(break_once)
    worker.submit(_request("broken", PROMPT, NEW))
    first = _collect(worker, {"broken"})["broken"]
    worker.submit(_request("broken", PROMPT, NEW))
    return first, _collect(worker, {"broken"})["broken"]


def _migrate(worker: ExpertWorker, rank: int, mail: Any, target: Placement, *, commit: bool) -> dict[str, Any]:
    plan = plan_migration(BASE, target, load_topology("3x1"), worker.expert_bytes)
    try:
        worker.prepare(target)
        early = None
    except MigrationError as error:
        early = str(error)
    for moves in plan.rounds:
        if any(rank in (move.source.rank, move.target.rank) for move in moves):
            worker.copy_round(target.epoch, moves)
    worker.prepare(target)
    held = worker.status().experts
    _meet(mail, rank)
    if commit:
        worker.commit(target.epoch)
        while worker.status().epoch != target.epoch:
            time.sleep(0.01)
    return {"early": early, "held": held, "rounds": len(plan.rounds)}


def _stale(worker: ExpertWorker) -> list[str]:
    found = []
    for call in (lambda: worker.prepare(NEXT), lambda: worker.copy_round(2, ()), lambda: worker.drop(1)):
        try:
            call()
        except StaleEpochError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def seen(trace_folder: Path) -> list[dict[str, Any]]:
    return run_ranks(serve, RANKS, str(trace_folder))


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    """What the plain model continues PROMPT[start:] with."""
    options = WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=None))
    model = load_model(options, torch.device("cpu"))
    texts = {}
    for start in range(3):
        ids = torch.tensor([PROMPT[start:]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        texts[start] = out[0, ids.shape[1] :].tolist()
    return texts


def test_the_text_is_that_of_the_plain_model(seen: list[dict[str, Any]], plain: dict[int, list[int]]) -> None:
    for rank in range(2):
        for index in range(3):
            tokens, end, _ = seen[rank]["answers"][str(10 * rank + index)]
            assert tokens == plain[index]
            assert end == FINISHED


def test_the_text_does_not_change_when_experts_move_under_it(
    seen: list[dict[str, Any]], plain: dict[int, list[int]]
) -> None:
    for rank in range(RANKS):
        assert seen[rank]["text across the move"][0] == plain[0]
    assert seen[0]["after"]["after-0"][0] == plain[0]


def test_a_streamed_request_gives_an_event_a_token(seen: list[dict[str, Any]]) -> None:
    assert seen[2]["text across the move"][2] == NEW


def test_each_bad_request_is_refused_for_what_is_wrong_with_it(seen: list[dict[str, Any]]) -> None:
    empty, foreign, none, long = seen[0]["refusals"]
    assert "the prompt is empty" in empty
    assert "token 6144 is not in the vocabulary (0 to 6143)" in foreign
    assert "max_new_tokens is 0" in none
    assert "20 prompt tokens + 5000 new ones are 5020, more than the 2048 that fit" in long


def test_a_cancelled_request_ends_and_its_id_can_be_used_again(
    seen: list[dict[str, Any]], plain: dict[int, list[int]]
) -> None:
    first, second = seen[1]["cancelled"]
    assert first[:2] == ([], CANCELLED)
    assert second[:2] == (plain[0], FINISHED)


def test_a_step_that_breaks_on_one_rank_fails_its_requests_and_no_others(
    seen: list[dict[str, Any]], plain: dict[int, list[int]]
) -> None:
    first, second = seen[1]["failed"]
    assert first[:2] == ([], FAILED)
    assert second[:2] == (plain[0], FINISHED)
    assert seen[0]["failed"]["beside"][:2] == (plain[0], FINISHED)


def test_an_epoch_whose_experts_are_not_here_is_refused(seen: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        assert f"rank {rank} lacks" in seen[rank]["early"]["early"]


def test_an_aborted_migration_leaves_the_old_epoch_and_frees_its_copies(seen: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        own = len(BASE.experts_on(rank))
        assert seen[rank]["aborted to"] == 0
        assert seen[rank]["early"]["held"] > own
        assert "lacks" in seen[rank]["moved"]["early"]


def test_after_the_drop_each_rank_holds_exactly_what_the_placement_says(seen: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        assert seen[rank]["dropped"] > 0
        assert seen[rank]["status"].experts == len(AFTER_THAT.experts_on(rank))
        assert seen[rank]["status"].epoch == 2


def test_a_stale_epoch_is_refused(seen: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        assert len(seen[rank]["stale"]) == 3


def test_the_trace_holds_every_token_that_went_through_the_model(
    seen: list[dict[str, Any]], trace_folder: Path
) -> None:
    trace = load_trace(trace_folder)
    chosen = trace.select(trace.request == 11)
    assert sorted(chosen.position.tolist()) == list(range(len(PROMPT) - 1 + NEW - 1))
    assert set(chosen.source_rank.tolist()) == {1}
    order = np.argsort(chosen.position)
    assert chosen.token_id is not None
    assert chosen.token_id[order][: len(PROMPT) - 1].tolist() == list(PROMPT[1:])
    assert chosen.phase[order].tolist() == [1] * (len(PROMPT) - 1) + [0] * (NEW - 1)


def test_every_step_is_timed_and_all_ranks_number_them_alike(seen: list[dict[str, Any]]) -> None:
    numbers = [[step.step for step in seen[rank]["clock"]] for rank in range(RANKS)]
    assert numbers[0] == list(range(len(numbers[0])))
    assert all(other == numbers[0] for other in numbers)
    for step in seen[0]["clock"]:
        assert 0 < step.dispatch_s + step.compute_s + step.combine_s < step.total_s
