"""Prefetch by the next layer's router, in serving: the demo model on a CPU, over a link in software.

Two workers of one rank each, alike but for the prefetch, serve the same prompts by turns. Prints tokens/s of both,
medians over the turns, how often the router that was asked early was right, and what became of what was fetched; writes
JSON. Exits 1 where a text differs.

    python scripts/bench/prefetch.py --link-gbs 0.2 --out docs/measured/prefetch.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.text import load_tokenizer
from placement.baselines import linear_placement
from placement.intervals import random_groups
from placement.topology import load_topology
from workers.foresight import NextRouter, next_routers
from workers.loading import load_model, shape_of
from workers.options import RecorderOptions, WorkerOptions
from workers.prefetch import PrefetchTrial
from workers.requests import GenerationRequest
from workers.seam import experts_modules
from workers.worker import ExpertWorker

NEW = 48
PROMPTS = Path(__file__).parents[2] / "configs" / "prompts" / "demo.jsonl"


def start(options: WorkerOptions) -> ExpertWorker:
    """A worker of one rank that serves."""
    topology = load_topology("1x1")
    shape = shape_of(load_model(options, torch.device("cpu")))
    placement = linear_placement(shape.num_layers, shape.num_experts, 1, shape.num_experts)
    worker = ExpertWorker(options, rank=0, topology=topology, placement=placement)
    worker.join(worker.open_rendezvous(host="127.0.0.1", interface="lo"))
    return worker


class NoTrial(PrefetchTrial):
    """Fetches ahead whatever it costs, as far as the other limits allow."""

    def wants(self, step: int) -> bool:
        return True


def serve(worker: ExpertWorker, prompts: list[tuple[int, ...]], turn: int) -> tuple[dict[int, list[int]], float]:
    """All prompts at once, to their end: the answers by prompt, and tokens/s of what was generated."""
    texts: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    begun = time.perf_counter()
    for index, prompt in enumerate(prompts):
        name = str(1000 * turn + index)
        worker.submit(GenerationRequest(request=name, prompt=prompt, max_new_tokens=NEW))
    ends = 0
    while ends < len(prompts):
        for event in worker.next_events(1.0):
            texts[int(event.request) % 1000] += event.tokens
            ends += event.end is not None
    return texts, sum(map(len, texts.values())) / (time.perf_counter() - begun)


def foresight(options: WorkerOptions, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
    """How many of the experts that a token needs its last layer's state names, and how many named ones it needs.

    As many are named as are needed, so that precision and coverage are one number here.
    """
    model = load_model(options, torch.device("cpu"))
    shape = shape_of(model)
    routers = next_routers(model, top_k=shape.top_k)
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in range(shape.num_layers)}
    for layer, module in enumerate(experts_modules(model)):
        module.register_forward_pre_hook(
            lambda module, inputs, layer=layer: seen[layer].append((inputs[0], inputs[1])), with_kwargs=False
        )
    with torch.no_grad():
        for prompt in prompts:
            model(torch.tensor([prompt]))
        rates = [
            _agreement(router, seen[layer], seen[layer + 1])
            for layer, router in enumerate(routers)
            if router is not None
        ]
    return {"mean": statistics.mean(rates), "by_layer": rates}


def _agreement(
    router: NextRouter, now: list[tuple[torch.Tensor, torch.Tensor]], then: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    hits = []
    for (hidden, _), (_, needed) in zip(now, then, strict=True):
        named = router(hidden)
        assert named is not None
        hits.append((named.unsqueeze(2) == needed.unsqueeze(1)).any(dim=1).float().flatten())
    return float(torch.cat(hits).mean())


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    base = WorkerOptions(
        model=options.model,
        recorder=RecorderOptions(folder=None),
        device="cpu",
        cache_share=options.cache_share,
        link_bytes_per_s=options.link_gbs * 1e9,
        kv_pages=256,
    )
    tokenizer = load_tokenizer(base.model)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[: options.prompts]]
    prompts = [tuple(tokenizer(text)["input_ids"][:64]) for text in texts]
    figures: dict[str, Any] = {"router_asked_early": foresight(base, prompts), "batches": {}}
    for batch in options.batch:
        figures["batches"][batch] = compare(base, prompts[:batch], options.turns, always=options.always)
    return figures


def compare(base: WorkerOptions, prompts: list[tuple[int, ...]], turns: int, *, always: bool) -> dict[str, Any]:
    workers = {name: start(replace(base, prefetch=name == "with")) for name in ("without", "with")}
    if always:
        hooks: Any = workers["with"]._engine._hooks  # type: ignore[union-attr]
        hooks._trial = NoTrial()
    rates: dict[str, list[float]] = {name: [] for name in workers}
    differing = 0
    expected: dict[int, list[int]] = {}
    for turn in range(turns + 1):
        for name, worker in list(workers.items())[:: 1 if turn % 2 else -1]:
            texts, rate = serve(worker, prompts, turn)
            expected = expected or texts
            differing += texts != expected
            if turn:
                rates[name].append(rate)
    counters = workers["with"].status().cache
    without = workers["without"].status().cache
    for worker in workers.values():
        worker.stop()
    demand = counters["copies"] - counters["prefetched"]
    # Turns beside each other in pairs, with Student's interval over the pairs.
    gains = np.log(np.array(rates["with"]) / np.array(rates["without"]))
    interval = random_groups(float(gains.mean()), gains)
    return {
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "ratio": math.exp(gains.mean()),
        "ratio_95": None if interval is None else [math.exp(end) for end in interval],
        "turns": rates,
        "differing_texts": differing,
        "precision": counters["prefetch_used"] / max(1, counters["prefetched"]),
        "coverage": counters["prefetch_used"] / max(1, counters["prefetch_used"] + demand),
        "prefetched": counters["prefetched"],
        "wasted_mb": counters["prefetch_wasted_bytes"] / 1e6,
        "hit_rate": counters["hits"] / counters["lookups"],
        "hit_rate_without": without["hits"] / without["lookups"],
        "stall_s": counters["stall_s"],
        "stall_s_without": without["stall_s"],
    }


def show(figures: dict[str, Any]) -> None:
    found = figures["router_asked_early"]
    print(f"the next router, asked a layer early: {found['mean']:.2f} of what a token needs (precision and coverage)")
    print("by layer:", " ".join(f"{rate:.2f}" for rate in found["by_layer"]))
    print(
        f"{'batch':>5} {'without':>8} {'with':>8} {'ratio':>6} {'precision':>9} {'coverage':>8} {'wasted MB':>9} "
        "stall s"
    )
    for batch, row in figures["batches"].items():
        rates = row["tokens_per_s"]
        print(
            f"{batch:>5} {rates['without']:8.0f} {rates['with']:8.0f} {row['ratio']:6.2f} {row['precision']:9.2f} "
            f"{row['coverage']:8.2f} {row['wasted_mb']:9.1f} {row['stall_s_without']:.1f} -> {row['stall_s']:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("configs/models/demo"))
    parser.add_argument("--link-gbs", type=float, default=0.2)
    parser.add_argument("--cache-share", type=float, default=0.4)
    parser.add_argument("--prompts", type=int, default=32, help="of the demo's, at most 64 tokens of each")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--always", action="store_true", help="without the trial that turns off what does not pay")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moetis-prefetch-") as folder:
        figures = run(options, Path(folder))
    figures |= {
        "link_gbs": options.link_gbs,
        "cache_share": options.cache_share,
        "always": options.always,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, link in software",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    show(figures)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    if any(row["differing_texts"] for row in figures["batches"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
