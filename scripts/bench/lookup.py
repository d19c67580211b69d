"""What the host pays for a lookup in the expert cache, by part: a real trace over a link that costs nothing.

    python scripts/bench/lookup.py --trace mixed-64e-12l.npz --out docs/measured/lookup.json

Microseconds a layer, on any CPU. Before the launch: until the slots are known and what is missing is sent for, for
which the kernels wait. After it: what a GPU computes beside (learning, ranking, fences). Medians and means.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from placement.cache.finding import find
from placement.cache.policy import EvictionPolicy, PolicyName
from placement.cache.simulate import simulate
from placement.cache.stream import make_stream
from placement.core import ExpertId
from placement.trace import RoutingTrace, load_trace
from workers.host_slab import HostSlab
from workers.links import Arrival, DirectLink, Fence, Pair
from workers.slot_cache import SlotCache

BLOB = 256
FIT_STEPS, WARM_STEPS = 3000, 50


class FreeLink(DirectLink):
    """Copies nothing and takes no time: what is left is the cache's own."""

    overlaps = True
    defers = True

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> Arrival:
        return super().copy((), after=after, urgent=urgent)


def microseconds(action: Callable[[], Any], repeats: int = 300) -> float:
    """The median of one call."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def learned(trace: RoutingTrace, batch: int) -> EvictionPolicy:
    policy = EvictionPolicy(
        PolicyName.REUSE, num_layers=trace.num_layers, num_experts=trace.num_experts, top_k=trace.top_k, share=0.0
    )
    stream = make_stream(trace, batch=batch, max_steps=FIT_STEPS // batch)
    simulate(stream, policy, np.zeros(trace.num_layers, np.int64), np.ones(1, np.int64))
    return policy


def measure(trace: RoutingTrace, policy: EvictionPolicy, *, batch: int, share: float, steps: int) -> dict[str, float]:
    """One size of cache: the time of its layers before and after the launch, and of the parts alone."""
    layers, experts = trace.num_layers, trace.num_experts
    policy = copy.deepcopy(policy)
    policy.resize(share)
    slab = HostSlab(capacity=layers * experts, blob_bytes=BLOB)
    for layer in range(layers):
        for expert in range(experts):
            slab.add(ExpertId(layer, expert), torch.zeros(BLOB, dtype=torch.uint8))
    num_slots = max(1, round(share * layers * experts))
    cache = SlotCache(
        slab=slab,
        policy=policy,
        link=FreeLink(),
        num_slots=num_slots,
        blob_bytes=BLOB,
        device=torch.device("cpu"),
    )
    offsets = np.random.default_rng(0).integers(0, trace.num_tokens - steps - WARM_STEPS, batch)
    before, after = [], []
    for step in range(WARM_STEPS + steps):
        ids = trace.experts[offsets + step].astype(np.int64)
        if step == WARM_STEPS:
            before, after = [], []
            lookups, hits = cache.counters.lookups, cache.counters.hits
        for layer in range(layers):
            chosen = ids[:, layer].reshape(-1)
            begun = time.perf_counter()
            waves = cache.waves(layer, chosen)
            for number, wave in enumerate(waves):
                if number == 0:
                    wave.slots[chosen]
                    launched = time.perf_counter()
            cache.use_the_time()
            after.append(time.perf_counter() - launched)
            before.append(launched - begun)
    needed = np.unique(chosen)
    free = np.ones(num_slots, bool)
    layer_in, expert_in = np.divmod(np.random.default_rng(1).permutation(layers * experts)[:num_slots], experts)
    found, slot_at = np.zeros((3, experts + 1), np.int64), np.zeros((layers, experts + 1), np.int64)
    return {
        "hit_rate": (cache.counters.hits - hits) / (cache.counters.lookups - lookups),
        "before_launch_us": statistics.median(before) * 1e6,
        "after_launch_us": statistics.median(after) * 1e6,
        "before_mean_us": statistics.mean(before) * 1e6,
        "after_mean_us": statistics.mean(after) * 1e6,
        "find_us": microseconds(lambda: find(slot_at, free, free, 0, chosen, found)),
        "learn_us": microseconds(lambda: policy.observe(0, needed)),
        "rank_us": microseconds(lambda: policy.rank(layer_in, expert_in, free, len(needed))),
        "blob_us": microseconds(lambda: slab.blob(ExpertId(0, 0))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    fit, judged = load_trace(options.trace).split_by_request()
    rows = []
    for batch in (1, 8):
        policy = learned(fit, batch)
        for share in (0.25, 0.5, 0.95):
            row = {"batch": batch, "share": share}
            row |= measure(judged, policy, batch=batch, share=share, steps=max(1, options.steps // batch))
            rows.append(row)
            print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    if options.out is not None:
        machine = f"{platform.machine()}, {platform.processor() or platform.system()}"
        date = datetime.now(UTC).isoformat(timespec="seconds")
        result = {"date": date, "machine": machine, "commit": commit.strip(), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
