"""Soak of the expert cache on a CPU: everything at once, with random sleeps at every event of the link.

Random batches (none, one token, prefills), prefetches right and wrong, resizes, forced evictions, memory that runs
short and comes back, callers that break off. Every output is compared with a cache that holds all experts, bit by bit.
Prints what happened and how memory grew, writes JSON; exits 1 where an output differs or memory grows. A step that
takes longer than a minute counts as a deadlock: all threads' stacks are printed, and the process ends.

    python scripts/bench/soak_offload.py --seconds 600 --out docs/measured/soak-offload.json
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import logging
import math
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from workers.blob import layout_of
from workers.expert_compute import ExpertCompute
from workers.host_slab import HostSlab
from workers.links import DirectLink, Link
from workers.memory import CountedMemory
from workers.relief import Relief
from workers.seam import experts_modules
from workers.slot_cache import SlotCache
from workers.thread_link import ThreadLink

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 32, 4, 32, 16
BATCHES = (0, 1, 1, 1, 2, 5, 8, 32, 200)
LINK_BYTES_PER_S = 4e8
DEADLOCK_S = 60.0
# The largest batch's claim, and two slots.
LEAST_BYTES = 200 * TOP_K * 64 + 2 * 6400
GROWTH_LIMIT_MB = 64.0


class Soak:
    """One cache under test, one that holds everything, and the same weights behind both."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        config = OlmoeConfig(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            vocab_size=64,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        self.modules = experts_modules(model)
        self.layout = layout_of(self.modules[0], EXPERTS)
        self.slab = HostSlab(capacity=LAYERS * EXPERTS, blob_bytes=self.layout.num_bytes)
        for layer, module in enumerate(self.modules):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            for expert in range(EXPERTS):
                self.layout.pack(module, expert, self.slab.claim(ExpertId(layer, expert)))
                self.slab.publish(ExpertId(layer, expert))
        self.num_slots = LAYERS * EXPERTS // 3
        self.memory = CountedMemory()
        link = ThreadLink(bytes_per_s=LINK_BYTES_PER_S, chunk_bytes=self.layout.num_bytes // 4, delay=self._delay)
        self.cache = self._cache(self.num_slots, link, self.memory)
        self.relief = Relief(self.cache, self.memory, least=2, wait_steps=20)
        self.layers = self._computes(self.cache)
        self._resident = self._cache(LAYERS * EXPERTS, DirectLink(), CountedMemory())
        self._resident.warm_up(sorted(self.slab.experts()))
        self.plain = self._computes(self._resident)
        self.events: Counter[str] = Counter()

    def _cache(self, num_slots: int, link: Link, memory: CountedMemory) -> SlotCache:
        return SlotCache(
            slab=self.slab,
            policy=EvictionPolicy(
                PolicyName.REUSE, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, share=num_slots / 128
            ),
            link=link,
            num_slots=num_slots,
            blob_bytes=self.layout.num_bytes,
            device=torch.device("cpu"),
            landing_group=4,
            one_wave=6,
            stream_from=20,
            link_bytes_per_s=math.inf,
            memory=memory,
        )

    def _computes(self, cache: SlotCache) -> list[ExpertCompute]:
        return [
            ExpertCompute(
                layer=layer,
                module=module,
                layout=self.layout,
                cache=cache,
                partial_dtype=torch.float64,
            )
            for layer, module in enumerate(self.modules)
        ]

    def _delay(self) -> None:
        # Called by the link's thread too: `random` locks for itself.
        time.sleep(self.random.choice((0, 0, 0, 0.0001, 0.0005, 0.002)))

    def step(self) -> bool:
        """One step through all layers, with mischief between them. Returns whether every output was equal."""
        tokens = self.random.choice(BATCHES)
        hidden = torch.randn(tokens, HIDDEN)
        equal = True
        for layer in range(LAYERS):
            self._mischief()
            chosen = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
            weights = torch.rand(tokens, TOP_K)
            ahead = None
            if layer + 1 < LAYERS and self.cache.ahead.looks_ahead():
                # The same experts as here with some right ones among them would be no test: half are at random.
                ahead = torch.where(torch.rand(tokens, TOP_K) < 0.5, chosen, torch.randint(EXPERTS, (tokens, TOP_K)))
            found = self.relief.attempt(functools.partial(self._compute, layer, hidden, chosen, weights, ahead))
            expected = self.plain[layer](hidden, chosen, weights)
            equal = equal and found.float().equal(expected.float())
            hidden = torch.tanh(expected.float())
        self.relief.end_step()
        self.events["steps"] += 1
        self.events["tokens"] += tokens
        return equal

    def _compute(
        self,
        layer: int,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        ahead: torch.Tensor | None,
    ) -> torch.Tensor:
        self.memory.claim("a layer", chosen.numel() * 64)
        found = self.layers[layer](hidden, chosen, weights, ahead=ahead)
        self.memory.claim("a layer", 0)
        return found

    def _mischief(self) -> None:
        draw = self.random.random()
        if draw < 0.02:
            self.cache.resize(self.random.randint(1, 2 * self.num_slots))
            self.events["resizes"] += 1
        elif draw < 0.10:
            for _ in range(self.random.randint(1, 10)):
                self.cache.forget(ExpertId(self.random.randrange(LAYERS), self.random.randrange(EXPERTS)))
                self.events["forced evictions"] += 1
        elif draw < 0.13:
            # Others take nearly all that is free.
            self.memory.limit_bytes = max(self.cache.num_bytes, LEAST_BYTES) + self.random.randint(0, 2000)
            self.events["memory short"] += 1
        elif draw < 0.18:
            self.memory.limit_bytes = float("inf")
        elif draw < 0.22:
            waves = self.cache.waves(self.random.randrange(LAYERS), np.array(self.random.sample(range(EXPERTS), 9)))
            next(waves)
            waves.close()
            self.events["broken off"] += 1

    def close(self) -> None:
        self.cache.close()


def run(seconds: float, seed: int = 0) -> dict[str, Any]:
    """Soak for so long. Returns the figures."""
    torch.set_num_threads(1)
    soak = Soak(seed)
    process = psutil.Process()
    begun = time.monotonic()
    differing = 0
    memory: list[tuple[float, int]] = []
    while (elapsed := time.monotonic() - begun) < seconds:
        faulthandler.dump_traceback_later(DEADLOCK_S, exit=True)
        differing += not soak.step()
        if not memory or elapsed - memory[-1][0] > seconds / 100:
            memory.append((elapsed, process.memory_info().rss))
    faulthandler.cancel_dump_traceback_later()
    soak.close()
    counters = soak.cache.counters
    settled = [rss for elapsed, rss in memory if elapsed > seconds / 5] or [memory[-1][1]]
    return {
        "seconds": seconds,
        "seed": seed,
        "events": dict(soak.events),
        "differing_steps": differing,
        "copies": counters.copies,
        "hit_rate": counters.hit_rate,
        "prefetched": counters.prefetched,
        "prefetch_used": counters.prefetch_used,
        "streamed_layers": counters.streamed_layers,
        "reliefs": counters.reliefs,
        "resizes": counters.resizes,
        "rss_mb_after_a_fifth": settled[0] / 1e6,
        "rss_mb_at_the_end": settled[-1] / 1e6,
        "threads_at_the_end": threading.active_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    options = parser.parse_args()
    logging.getLogger("workers").setLevel(logging.ERROR)
    with torch.no_grad():
        figures = run(options.seconds, options.seed)
    figures |= {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, link in software",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    for name, value in figures.items():
        print(f"{name:22} {value:.4g}" if isinstance(value, float) else f"{name:22} {value}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    growth = figures["rss_mb_at_the_end"] - figures["rss_mb_after_a_fifth"]
    if figures["differing_steps"] or growth > GROWTH_LIMIT_MB:
        print(f"{figures['differing_steps']} steps differ; memory grew by {growth:.0f} MB", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
