"""One GPU runs out of memory while it serves: the cache gives way and grows back, and texts are the plain model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from placement.baselines import linear_placement
from placement.topology import load_topology
from workers.loading import load_model
from workers.options import WorkerOptions
from workers.recorder import RecorderOptions
from workers.relief import WAIT_STEPS
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]
MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
PROMPTS = [tuple(range(start, start + 12)) for start in (40, 900, 3000)]
NEW = 24


def test_a_gpu_that_runs_out_of_memory_serves_on_with_fewer_slots_and_grows_back() -> None:
    options = WorkerOptions(
        model=MODEL, recorder=RecorderOptions(folder=None), device="cuda", dtype="float32", kv_pages=64, cache_share=0.3
    )
    model = load_model(options, torch.device("cpu"))
    plain = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    worker = ExpertWorker(options, rank=0, topology=load_topology("1x1"), placement=linear_placement(8, 32, 1, 32))
    worker.join(worker.open_rendezvous(host="127.0.0.1", interface="lo"))
    whole = worker.status().slot_bytes
    assert _texts(worker, "a") == plain
    allocated = torch.cuda.memory_allocated()
    attention = worker._parallel.model.model.layers[3].self_attn

    def fail(module: Any, inputs: Any) -> None:
        hook.remove()
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")

    hook = attention.register_forward_pre_hook(fail)
    assert _texts(worker, "b") == plain
    status = worker.status()
    assert status.cache["reliefs"] == 1
    assert status.slot_bytes < whole
    assert torch.cuda.memory_allocated() < allocated
    rounds = 0
    while worker.status().slot_bytes < whole and rounds * NEW < 4 * WAIT_STEPS:
        assert _texts(worker, f"c{rounds}") == plain
        rounds += 1
    assert worker.status().slot_bytes == whole
    print(worker.status().cache)
    worker.stop()


def _texts(worker: ExpertWorker, name: str) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        worker.submit(GenerationRequest(request=f"{name}-{index}", prompt=prompt, max_new_tokens=NEW))
    texts: dict[str, list[int]] = {}
    while len(texts) < len(PROMPTS):
        for event in worker.next_events(60.0):
            texts[event.request] = list(event.tokens)
    return [texts[f"{name}-{index}"] for index in range(len(PROMPTS))]
