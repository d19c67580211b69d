"""A long prompt on a card with little memory: weights of 18 GB on 8 GB, a context of 64K tokens.

    python scripts/bench/long_context.py --weights-gb 18 --memory-gb 8 --tokens 65536 --out long-context.json

A random model in OLMoE's shape (grouped-query attention), as many layers as make the weights so large; a worker of its
own, limited as a small card is, with slots by the arithmetic of `moetis fit`; beside it, in a process of its own, the
plain model on the whole card. Without a GPU a small model runs: a trial of the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig

from placement.baselines import linear_placement
from placement.errors import ConfigError
from placement.fit.checkpoint import read_checkpoint
from placement.fit.precision import Precision
from placement.fit.serving import ServingRequest, fit_for_serving
from placement.topology import load_topology
from workers.options import RecorderOptions, WorkerOptions
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
EXPERTS, TOP_K, PAGE, NEW = (64, 8, 32, 16) if CUDA else (16, 2, 32, 8)
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = (2048, 1024, 16, 4) if CUDA else (32, 64, 4, 2)
VOCABULARY = 50_304 if CUDA else 64
# Two logits of the plain model closer than this are a tie in bfloat16.
TIE = 0.05


def make_model(folder: Path, weights_gb: float, tokens: int) -> int:
    """Write a random checkpoint; returns its number of layers."""
    a_layer = EXPERTS * 3 * HIDDEN * INTERMEDIATE * DTYPE.itemsize
    layers = max(2, round(weights_gb * 1e9 / a_layer))
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.04 if CUDA else 0.3)
    model.save_pretrained(folder)
    return layers


def prompt_of(tokens: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(1, VOCABULARY, (tokens - NEW,), generator=generator).tolist())


@torch.no_grad()
def run_plain(folder: Path, tokens: int) -> dict[str, Any]:
    """The plain model's text, and how far its first choice was ahead of the second each time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE)
    begun = time.perf_counter()
    found = model.generate(
        torch.tensor([prompt_of(tokens)], device=DEVICE),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(found.logits).float().topk(2).values
    return {
        "seconds": time.perf_counter() - begun,
        "text": found.sequences[0, -NEW:].tolist(),
        "ahead": (best[:, 0] - best[:, 1]).tolist(),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else None,
    }


def options_for(folder: Path, memory_gb: float, tokens: int, chunk: int) -> tuple[WorkerOptions, str]:
    """What `serve` would tell the worker with `slots: auto`, and the arithmetic."""
    model = read_checkpoint(folder)
    fit = fit_for_serving(
        model,
        ServingRequest(
            memory_bytes=memory_gb * 1e9,
            kv_tokens=tokens,
            max_batch_tokens=chunk,
            max_requests=1,
            rows=len(model.layers) * EXPERTS,
            precision=Precision.STORED,
            element_bytes=DTYPE.itemsize,
            on_gpu=CUDA,
            machines=1,
            ranks=1,
        ),
        folder,
    )
    options = WorkerOptions(
        model=folder,
        recorder=RecorderOptions(folder=None),
        device=DEVICE,
        cache_share=(fit.slots - 0.5) / fit.rows,
        memory_bytes=memory_gb * 1e9,
        host_slab_rows=1.0,
        kv_page_size=PAGE,
        kv_pages=tokens // PAGE,
        max_batch_tokens=chunk,
        max_requests=1,
    )
    return options, fit.arithmetic()


def run_worker(options: WorkerOptions, layers: int, tokens: int) -> dict[str, Any]:
    placement = linear_placement(layers, EXPERTS, 1, EXPERTS)
    worker = ExpertWorker(options, rank=0, topology=load_topology("1x1"), placement=placement)
    worker.join(worker.open_rendezvous(host="127.0.0.1", interface="lo"))
    begun = time.perf_counter()
    worker.submit(GenerationRequest(request="long", prompt=prompt_of(tokens), max_new_tokens=NEW, stream=True))
    text: list[int] = []
    first_s, error, ended = 0.0, None, False
    while not ended:
        for event in worker.next_events(60.0):
            if event.tokens and not text:
                first_s = time.perf_counter() - begun
            text += event.tokens
            error, ended = event.error, event.end is not None or event.error is not None
    seconds = time.perf_counter() - begun
    status = worker.status()
    worker.stop()
    return {
        "text": text,
        "error": error,
        "first_token_s": first_s,
        "seconds": seconds,
        "peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else None,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if CUDA else None,
        "slots_gb": status.slot_bytes / 1e9,
        "steps": status.steps,
        "reliefs": status.cache["reliefs"],
        "hit_rate": status.cache["hits"] / max(1, status.cache["lookups"]),
    }


def first_difference(text: list[int], plain: list[int]) -> int | None:
    """Where the texts part; None if they do not."""
    return next((place for place, (one, other) in enumerate(zip(text, plain, strict=True)) if one != other), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights-gb", type=float, default=18.0)
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=65_536, help="of the context, prompt and answer together")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of the prompt in a step")
    parser.add_argument("--commit", default="", help="for machines without git")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plain-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain_of is not None:
        print(json.dumps(run_plain(options.plain_of, options.tokens)))
        return 0
    if options.tokens % PAGE or options.tokens <= 2 * PAGE:
        parser.error(
            f"--tokens {options.tokens}: it must be a multiple of {PAGE}, the KV cache's page, and over {2 * PAGE}"
        )
    try:
        return compare(options)
    except ConfigError as error:
        parser.exit(2, f"{error}\n")


def compare(options: argparse.Namespace) -> int:
    """Both models on the same prompt. Raises ConfigError where not even one expert has room."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layers = make_model(folder, options.weights_gb, options.tokens)
        if CUDA:
            torch.cuda.empty_cache()
        print(
            f"model: {layers} layers, {sum(file.stat().st_size for file in folder.iterdir()) / 1e9:.3g} GB", flush=True
        )
        command = [sys.executable, __file__, "--plain-of", str(folder), "--tokens", str(options.tokens)]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        plain = json.loads(said.splitlines()[-1])
        print(f"plain: {plain['seconds']:.3g} s, peak {plain['peak_gb']} GB", flush=True)
        told, arithmetic = options_for(folder, options.memory_gb, options.tokens, options.chunk)
        print(arithmetic, flush=True)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        found = run_worker(told, layers, options.tokens)
    where = None if found["error"] else first_difference(found["text"], plain["text"])
    found["equal_tokens"] = len(plain["text"]) if where is None else where
    found["tie_where_they_part"] = where is not None and plain["ahead"][where] < TIE
    for key, value in found.items():
        print(f"{key:<22} {value:.4g}" if isinstance(value, float) else f"{key:<22} {value}")
    if options.out is not None:
        machine = torch.cuda.get_device_name() if CUDA else "CPU"
        asked = {
            key: value for key, value in vars(options).items() if key in ("weights_gb", "memory_gb", "tokens", "chunk")
        }
        date = datetime.now(UTC).isoformat(timespec="seconds")
        result = {"date": date, "machine": machine, "commit": options.commit, **asked, "layers": layers}
        result |= {"arithmetic": arithmetic, "plain": plain, "worker": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    right = not found["error"] and (where is None or found["tie_where_they_part"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
