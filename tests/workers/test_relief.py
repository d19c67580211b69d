"""Memory that runs short: the expert cache gives way, the worker stays up, texts stay the same, and it grows back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.baselines import linear_placement
from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from placement.errors import ConfigError
from placement.topology import load_topology
from tests.workers.ranks import run_ranks
from workers.host_slab import HostSlab
from workers.links import DirectLink
from workers.loading import load_model
from workers.memory import CountedMemory
from workers.options import RecorderOptions, WorkerOptions
from workers.relief import Relief
from workers.requests import GenerationRequest
from workers.slot_cache import SlotCache
from workers.worker import ExpertWorker

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
BLOB, EXPERTS = 256, 16
PROMPT, NEW = tuple(range(40, 52)), 8


def _cache(memory: CountedMemory) -> SlotCache:
    slab = HostSlab(capacity=EXPERTS, blob_bytes=BLOB)
    for expert in range(EXPERTS):
        slab.add(ExpertId(0, expert), torch.full((BLOB,), expert, dtype=torch.uint8))
    return SlotCache(
        slab=slab,
        policy=EvictionPolicy(PolicyName.LRU, num_layers=1, num_experts=EXPERTS, top_k=2, share=0.5),
        link=DirectLink(),
        num_slots=8,
        blob_bytes=BLOB,
        device=torch.device("cpu"),
        memory=memory,
    )


def test_what_failed_is_tried_again_with_fewer_slots(caplog: pytest.LogCaptureFixture) -> None:
    memory = CountedMemory(10 * BLOB)
    cache = _cache(memory)
    relief = Relief(cache, memory, least=2)
    relief.attempt(lambda: memory.claim("a layer", 4 * BLOB))
    assert (cache.num_slots, cache.ahead.region, cache.counters.reliefs) == (6, 0, 1)
    assert "from 8 to 6 slots" in caplog.text
    relief.attempt(lambda: memory.claim("a layer", 7 * BLOB))
    assert cache.num_slots == 3
    with pytest.raises(torch.OutOfMemoryError):
        relief.attempt(lambda: memory.claim("a layer", 9 * BLOB))


def test_the_cache_never_goes_below_its_least() -> None:
    memory = CountedMemory(10 * BLOB)
    cache = _cache(memory)
    relief = Relief(cache, memory, least=5)
    relief.reserve("the KV cache", 5 * BLOB)
    assert cache.num_slots == 5
    with pytest.raises(torch.OutOfMemoryError, match="the KV cache"):
        relief.reserve("the KV cache", 6 * BLOB)
    assert not relief.make_room("nothing is left")


def test_the_cache_grows_back_when_there_is_room_and_waits_longer_after_a_setback() -> None:
    memory = CountedMemory(10 * BLOB)
    cache = _cache(memory)
    relief = Relief(cache, memory, least=2, wait_steps=2)
    relief.attempt(lambda: memory.claim("a layer", 4 * BLOB))
    sizes = []
    for step in range(8):
        if step == 4:
            memory.claim("a layer", 0)
        relief.end_step()
        sizes.append(cache.num_slots)
    assert sizes == [6, 6, 6, 6, 6, 8, 8, 8]
    assert cache.ahead.region == 1
    relief.make_room("again")
    relief.make_room("and again")
    for _ in range(3):
        relief.end_step()
    assert cache.num_slots == 4


def test_where_there_is_no_room_for_more_slots_the_old_number_stays() -> None:
    memory = CountedMemory(10 * BLOB)
    cache = _cache(memory)
    cache.resize(11)
    assert cache.num_slots == 8
    memory.limit_bytes = 3 * BLOB
    cache.resize(7)
    assert cache.num_slots == 3


def test_a_cache_that_does_not_fit_starts_with_what_does(caplog: pytest.LogCaptureFixture) -> None:
    assert _cache(CountedMemory(5 * BLOB)).num_slots == 4
    assert "no room for 8 slots" in caplog.text


def test_a_budget_that_is_too_small_is_refused_with_what_would_be_right() -> None:
    def start(memory_bytes: float) -> None:
        options = WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=None), memory_bytes=memory_bytes)
        topology = load_topology("1x1")
        worker = ExpertWorker(options, rank=0, topology=topology, placement=linear_placement(8, 32, 1, 32))
        worker.join(worker.open_rendezvous(host="127.0.0.1", interface="lo"))

    with pytest.raises(ConfigError, match=r"the model: .* raise workers.memory_gb"):
        start(1e6)
    with pytest.raises(ConfigError, match=r"KV cache of 16384 tokens, even with 4 slots.*lower workers.kv_pages"):
        start(2e7)


def serve(rank: int, mail: Any) -> dict[str, Any]:
    options = WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=None), kv_pages=64, memory_bytes=1e9)
    topology = load_topology("2x1")
    worker = ExpertWorker(options, rank=rank, topology=topology, placement=linear_placement(8, 32, 2, 16))
    if rank == 0:
        meeting = worker.open_rendezvous(host="127.0.0.1", interface="lo")
        mail[1].put(meeting)
    else:
        meeting = mail[1].get(timeout=60)
    worker.join(meeting)
    memory = worker._parallel.memory
    assert isinstance(memory, CountedMemory)
    seen: dict[str, Any] = {"slots": [worker.status().slot_bytes]}
    if rank == 1:
        # In the middle of a layer: others took all that was free.
        memory.limit_bytes = sum(memory._taken.values())
    seen["layer"] = _answer(worker, f"layer-{rank}")
    seen["slots"].append(worker.status().slot_bytes)
    if rank == 1:
        _fail_once(worker)
    seen["step"] = _answer(worker, f"step-{rank}")
    seen["status"] = worker.status()
    worker.stop()
    return seen


def _fail_once(worker: ExpertWorker) -> None:
    attention = worker._parallel.model.model.layers[3].self_attn

    def fail(module: Any, inputs: Any) -> None:
        hook.remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = attention.register_forward_pre_hook(fail)


def _answer(worker: ExpertWorker, name: str) -> list[int]:
    worker.submit(GenerationRequest(request=name, prompt=PROMPT, max_new_tokens=NEW))
    tokens: list[int] = []
    while True:
        for event in worker.next_events(60.0):
            tokens += event.tokens
            if event.end is not None:
                return tokens


def test_ranks_stay_in_step_and_texts_the_same_while_one_runs_out_of_memory() -> None:
    model = load_model(WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=None)), torch.device("cpu"))
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    logging.disable(logging.WARNING)
    other, short = run_ranks(serve, 2)
    logging.disable(logging.NOTSET)
    for seen in (other, short):
        assert seen["layer"] == seen["step"] == plain
        assert seen["status"].alive
    assert short["slots"][1] < short["slots"][0]
    assert short["status"].slot_bytes < short["slots"][1]
    assert short["status"].cache["reliefs"] >= 2
    assert (other["slots"][0], other["status"].cache["reliefs"]) == (other["status"].slot_bytes, 0)
