"""Long contexts on a small budget: a prompt goes through in chunks, and the experts' slots give way to the KV cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from placement.baselines import linear_placement
from placement.topology import load_topology
from workers.loading import load_model
from workers.options import RecorderOptions, WorkerOptions
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

LAYERS, EXPERTS, HIDDEN, PAGE = 2, 64, 32, 32
KV_BYTES_PER_TOKEN = LAYERS * 2 * HIDDEN * 4
# Embeddings, attention, a layer's own tensors, and a part of the experts' slots of 3.1 MB.
BESIDE_KV_BYTES = 2_200_000
NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        max_position_embeddings=65_536,
        eos_token_id=None,
        pad_token_id=0,
    )
    found = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found.save_pretrained(folder)
    return folder


def _worker(options: WorkerOptions) -> ExpertWorker:
    placement = linear_placement(LAYERS, EXPERTS, 1, EXPERTS)
    worker = ExpertWorker(options, rank=0, topology=load_topology("1x1"), placement=placement)
    worker.join(worker.open_rendezvous(host="127.0.0.1", interface="lo"))
    return worker


def _answers(worker: ExpertWorker, prompts: dict[str, tuple[int, ...]], new: int) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        worker.submit(GenerationRequest(request=name, prompt=prompt, max_new_tokens=new))
    texts: dict[str, list[int]] = {name: [] for name in prompts}
    ended = 0
    while ended < len(prompts):
        for event in worker.next_events(60.0):
            assert event.error is None
            texts[event.request] += event.tokens
            ended += event.end is not None
    return texts


def _plain(options: WorkerOptions, prompt: tuple[int, ...], new: int) -> list[int]:
    model = load_model(options, torch.device("cpu"))
    found = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    return found[0, len(prompt) :].tolist()


def _prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.mark.parametrize("tokens", [8_192, pytest.param(65_536, marks=pytest.mark.slow)])
def test_a_long_prompt_is_answered_on_a_small_budget_and_the_experts_slots_give_way(model: Path, tokens: int) -> None:
    options = WorkerOptions(
        model=model,
        recorder=RecorderOptions(folder=None),
        cache_share=1.0,
        kv_page_size=PAGE,
        kv_pages=tokens // PAGE,
        memory_bytes=tokens * KV_BYTES_PER_TOKEN + BESIDE_KV_BYTES,
    )
    prompt = _prompt(tokens - NEW)
    worker = _worker(options)
    text = _answers(worker, {"long": prompt}, NEW)["long"]
    status = worker.status()
    worker.stop()
    assert text == _plain(options, prompt, NEW)
    assert status.cache["reliefs"] > 0
    blob_bytes = 3 * HIDDEN * 64 * 4
    assert 3 * blob_bytes <= status.slot_bytes < LAYERS * EXPERTS * blob_bytes
    assert status.steps >= tokens // options.max_batch_tokens


def test_requests_for_which_the_kv_cache_is_too_small_wait_in_host_memory_and_go_on_from_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a GPU nothing can be pinned; all else is as on one.
    empty, restored = torch.empty, []

    def unpinned(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*size, **more)

    restore = OffloadingManager.restore_scheduled_requests

    def watched(self: OffloadingManager, batch: list[Any]) -> None:
        restored.extend(entry.state.request_id for entry in batch if entry.state.is_cpu_offloaded)
        restore(self, batch)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(OffloadingManager, "restore_scheduled_requests", watched)
    options = WorkerOptions(
        model=model, recorder=RecorderOptions(folder=None), kv_page_size=PAGE, kv_pages=8, kv_offload_gb=0.01
    )
    prompts = {str(seed): _prompt(60, seed) for seed in range(4)}
    worker = _worker(options)
    texts = _answers(worker, prompts, 100)
    worker.stop()
    assert restored
    for name, prompt in prompts.items():
        assert texts[name] == _plain(options, prompt, 100)


@pytest.mark.slow
def test_the_bench_of_long_contexts_finds_the_plain_models_text() -> None:
    script = Path(__file__).parents[2] / "scripts" / "bench" / "long_context.py"
    small = ["--weights-gb", "0.0015", "--memory-gb", "0.003", "--tokens", "1024", "--chunk", "256"]
    done = subprocess.run([sys.executable, script, *small], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "equal_tokens           8" in done.stdout
