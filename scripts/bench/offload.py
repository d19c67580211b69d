"""Experts in host memory on one GPU: copies, step times and tokens/s, beside baselines in the same run.

    python scripts/bench/offload.py --stage all --trace mixed-64e-12l.npz --out offload.json

Random weights in the shape of OLMoE's experts (64 experts, hidden 2048, intermediate 1024, bf16; 12 layers of experts
alone, no attention) or of another model's (--shape), with real routing ids, the same for everyone. Without a GPU a
small float32 model runs, with a thread and a token bucket of 0.2 GB/s for the link. `offload_run.py` runs all of it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, OlmoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.cache.simulate import simulate
from placement.cache.stream import make_stream
from placement.core import ExpertId
from placement.files import write_whole
from placement.trace import RoutingTrace, load_trace
from scripts.bench.offload_shapes import SHAPES, Shape, routing_for
from workers.blob import layout_of
from workers.cuda_edge import link_for
from workers.expert_compute import ExpertCompute
from workers.host_slab import HostSlab
from workers.links import Link
from workers.seam import experts_modules
from workers.slot_cache import SlotCache
from workers.thread_link import ThreadLink

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
SHARES = (0.10, 0.25, 0.50, 1.0)
STEPS = {1: 100, 8: 30, 32: 16, 2048: 4} if CUDA else {1: 10, 8: 3}
WARM_STEPS = 30 if CUDA else 3
ONE_STEP = 256
CPU_LINK = 2e8
STAGES = ("copies", "small", "cached", "resident", "peers", "launches", "precision", "tiers", "soak")


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Bench:
    """The weights in host memory, the routing, and what was measured so far. keep: what is done with the rows after
    each new one, so that who is cut off has what was measured."""

    def __init__(
        self,
        trace: RoutingTrace,
        shape: Shape = SHAPES["olmoe"],
        batches: dict[int, int] = STEPS,
        *,
        keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    ) -> None:
        self.batches = batches
        self._keep = keep
        trace = routing_for(trace, shape)
        config = OlmoeConfig(
            hidden_size=shape.hidden if CUDA else 64,
            intermediate_size=shape.intermediate if CUDA else 32,
            num_experts=trace.num_experts,
            num_experts_per_tok=trace.top_k,
            num_hidden_layers=1,
            num_attention_heads=4,
            vocab_size=64,
        )
        with torch.device("meta"):
            meta = experts_modules(AutoModelForCausalLM.from_config(config, dtype=DTYPE))[0]
        self.module = meta
        self.layout = layout_of(meta, trace.num_experts)
        self.fit, self.judged = trace.split_by_request()
        self.trace = trace
        self.rows: list[dict[str, Any]] = []
        self._learned: dict[int, EvictionPolicy] = {}
        begun = time.perf_counter()
        self.slab = HostSlab(capacity=trace.num_layers * trace.num_experts, blob_bytes=self.layout.num_bytes, pin=CUDA)
        self.note("slab", gib=self.slab.num_bytes / 2**30, seconds=time.perf_counter() - begun)
        self.resident = [self._layer(layer) for layer in range(trace.num_layers)]

    def _layer(self, layer: int) -> nn.Module:
        """One layer's weights on the device, as the plain model has them; its blobs go to the slab."""
        torch.manual_seed(layer)
        shapes = {name: tuple(value.shape) for name, value in self.module.named_parameters(recurse=False)}
        weights = {name: torch.randn(shape, dtype=DTYPE, device=DEVICE) * 0.02 for name, shape in shapes.items()}
        packed = torch.zeros((self.trace.num_experts, self.layout.num_bytes), dtype=torch.uint8, device=DEVICE)
        for name, view in self.layout.views(packed).items():
            view.copy_(weights[name])
        for expert, blob in enumerate(packed.cpu()):
            self.slab.add(ExpertId(layer, expert), blob)
        return _Weights(self.module, weights)

    def note(self, what: str, **figures: Any) -> None:
        self.rows.append({"what": what, **figures})
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        print(f"{what:<26} {shown}", flush=True)
        self._keep(self.rows)

    def steps(self, batch: int, count: int) -> list[torch.Tensor]:
        """count steps of ids [L, batch, K], from the judged requests: decode streams, or one long prefill."""
        tokens = self.judged.num_tokens
        rng = np.random.default_rng(0)
        if batch > 256:
            starts = rng.integers(0, tokens - batch, count)
            picks = [np.arange(start, start + batch) for start in starts]
        else:
            offsets = rng.integers(0, tokens - count, batch)
            picks = [offsets + step for step in range(count)]
        return [torch.from_numpy(self.judged.experts[pick].transpose(1, 0, 2).astype(np.int64)) for pick in picks]

    def cache(
        self, share: float, batch: int, *, learn: bool = True, link_bytes_per_s: float | None = None
    ) -> SlotCache:
        """link_bytes_per_s: what prefetches may count on; without it there are none, unless the cache is warmed up."""
        trace = self.trace
        policy = copy.deepcopy(self._policy(batch if learn else 0))
        policy.resize(share)
        link: Link = link_for(DEVICE, self.slab.memory) if CUDA else ThreadLink(bytes_per_s=CPU_LINK)
        return SlotCache(
            slab=self.slab,
            policy=policy,
            link=link,
            num_slots=max(1, round(share * trace.num_layers * trace.num_experts)),
            blob_bytes=self.layout.num_bytes,
            device=DEVICE,
            link_bytes_per_s=link_bytes_per_s,
        )

    def _policy(self, batch: int) -> EvictionPolicy:
        """A policy that has seen the fit requests in batches of this size; of 0: that has seen nothing."""
        if batch not in self._learned:
            trace = self.trace
            policy = EvictionPolicy(
                PolicyName.REUSE, num_layers=trace.num_layers, num_experts=trace.num_experts, top_k=trace.top_k, share=0
            )
            if batch:
                streams = min(batch, 32)
                stream = make_stream(self.fit, batch=streams, max_steps=(20_000 if CUDA else 500) // streams)
                simulate(stream, policy, np.zeros(trace.num_layers, np.int64), np.ones(1, np.int64))
            self._learned[batch] = policy
        return self._learned[batch]

    def computes(self, cache: SlotCache, *, few_pairs: int | None = None) -> list[Layer]:
        """The layers through a cache; few_pairs as for `ExpertCompute`."""
        layers = [
            ExpertCompute(
                layer=layer,
                module=self.module,
                layout=self.layout,
                cache=cache,
                partial_dtype=torch.float32,
                few_pairs=few_pairs,
            )
            for layer in range(self.trace.num_layers)
        ]
        return [functools.partial(layer, alone=True) for layer in layers]


class _Weights(nn.Module):
    """What Transformers' grouped forward calls self: an experts module with these weights."""

    def __init__(self, module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            self._parameters[name] = nn.Parameter(value, requires_grad=False)
        object.__setattr__(self, "like", module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["like"], name)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = grouped_mm_experts_forward(self, hidden, ids, weights)
        return out


def run_step(layers: list[Any], hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A residual stack of expert layers. ids [L, n, K] on the device."""
    for layer, chosen in zip(layers, ids, strict=True):
        hidden = hidden + layer(hidden, chosen, weights).to(hidden.dtype)
    return hidden


def timed_steps(layers: list[Any], steps: list[torch.Tensor], hidden_size: int) -> tuple[list[float], torch.Tensor]:
    """Seconds of each step, and the last output."""
    batch, top_k = steps[0].shape[1:]
    torch.manual_seed(1)
    hidden = torch.randn((batch, hidden_size), dtype=DTYPE, device=DEVICE)
    weights = torch.full((batch, top_k), 1 / top_k, dtype=DTYPE, device=DEVICE)
    on_device = [ids.to(DEVICE) for ids in steps]
    seconds = []
    for ids in on_device:
        _sync()
        begun = time.perf_counter()
        out = run_step(layers, hidden, ids, weights)
        _sync()
        seconds.append(time.perf_counter() - begun)
    return seconds, out


def _sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def raw_bandwidth(bench: Bench) -> float:
    """Bytes/s of plain pinned copies of one blob's size, back to back."""
    blob = bench.slab.blob(ExpertId(0, 0))
    target = torch.empty((64, len(blob)), dtype=torch.uint8, device=DEVICE)
    sources = [bench.slab.blob(ExpertId(1, expert % bench.trace.num_experts)) for expert in range(64)]
    best = []
    for _ in range(5):
        _sync()
        begun = time.perf_counter()
        for row, source in zip(target, sources, strict=True):
            row.copy_(source, non_blocking=True)
        _sync()
        best.append(target.numel() / (time.perf_counter() - begun))
    return statistics.median(best)


def stage_copies(bench: Bench) -> None:
    from scripts.bench.offload_unpinned import unpinned_copies

    raw = raw_bandwidth(bench) if CUDA else CPU_LINK
    bench.note("raw pinned copy", gbs=raw / 1e9)
    link: Link = link_for(DEVICE, bench.slab.memory) if CUDA else ThreadLink(bytes_per_s=CPU_LINK)
    target = torch.empty((64, bench.layout.num_bytes), dtype=torch.uint8, device=DEVICE)
    pairs = [(row, bench.slab.blob(ExpertId(1, index % bench.trace.num_experts))) for index, row in enumerate(target)]
    for urgent in (True, False):
        rates = []
        for _ in range(5):
            _sync()
            begun = time.perf_counter()
            arrivals = [link.copy(pairs[start : start + 4], after=None, urgent=urgent) for start in range(0, 64, 4)]
            for arrival in arrivals:
                arrival.finish()
            rates.append(target.numel() / (time.perf_counter() - begun))
        rate = statistics.median(rates)
        bench.note("demand copies" if urgent else "prefetch copies", gbs=rate / 1e9, of_raw=rate / raw)
    link.close()
    if CUDA:
        unpinned_copies(bench, raw)


def stage_resident(bench: Bench) -> None:
    cache = bench.cache(1.0, 1, learn=False)
    cache.warm_up(sorted(bench.slab.experts()))
    for batch, count in bench.batches.items():
        steps = bench.steps(batch, count + 5)
        plain, expected = timed_steps(bench.resident, steps, bench.module.hidden_dim)
        mine, out = timed_steps(bench.computes(cache), steps, bench.module.hidden_dim)
        a, b = statistics.median(plain[5:]), statistics.median(mine[5:])
        error = float((out - expected).float().norm() / expected.float().norm())
        bench.note("resident", batch=batch, plain_ms=a * 1e3, moetis_ms=b * 1e3, ratio=b / a, error=error)
    cache.close()


def stage_cached(bench: Bench) -> None:
    raw = raw_bandwidth(bench) if CUDA else CPU_LINK
    for batch, count in bench.batches.items():
        # A large batch fills the slots in a step or two; the policy has seen the fit part already.
        warm = max(3, min(WARM_STEPS, 240 // batch))
        steps = bench.steps(batch, count + warm)
        plain, expected = timed_steps(bench.resident, steps, bench.module.hidden_dim)
        compute = statistics.median(plain[warm:])
        for share in SHARES:
            cache = bench.cache(share, batch)
            if share == 1.0:
                cache.warm_up(sorted(bench.slab.experts()))
            layers = bench.computes(cache)
            timed_steps(layers, steps[:warm], bench.module.hidden_dim)
            before = (cache.counters.copied_bytes, cache.counters.lookups, cache.counters.hits)
            seconds, out = timed_steps(layers, steps[warm:], bench.module.hidden_dim)
            counters = cache.counters
            missed = (counters.copied_bytes - before[0]) / count
            bound = max(compute, missed / raw)
            step = statistics.mean(seconds)
            bench.note(
                "cached",
                batch=batch,
                share=share,
                # With everything in slots nothing is looked up on a GPU.
                hit_rate=(counters.hits - before[2]) / max(1, counters.lookups - before[1]) if share < 1.0 else 1.0,
                ms=step * 1e3,
                median_ms=statistics.median(seconds) * 1e3,
                bound_ms=bound * 1e3,
                of_bound=bound / step,
                tokens_per_s=batch / step,
                error=float((out - expected).float().norm() / expected.float().norm()),
            )
            cache.close()


def stage_peers(bench: Bench) -> None:
    """accelerate's CPU offload of the same layers, and a plain .to() of each expert that is needed."""
    if not CUDA:
        return
    from accelerate import cpu_offload

    layers = []
    for layer in range(bench.trace.num_layers):
        weights = {name: value.cpu() for name, value in bench.resident[layer].named_parameters()}
        holder = _Weights(bench.module, weights)
        cpu_offload(holder, DEVICE)
        layers.append(holder)
    plain = [_Plain(bench, layer) for layer in range(bench.trace.num_layers)]
    for batch in bench.batches:
        steps = bench.steps(batch, 3)
        seconds, _ = timed_steps(layers, steps, bench.module.hidden_dim)
        step = statistics.median(seconds[1:])
        bench.note("accelerate cpu_offload", batch=batch, ms=step * 1e3, tokens_per_s=batch / step)
        if batch <= ONE_STEP:
            seconds, _ = timed_steps(plain, steps[:2], bench.module.hidden_dim)
            bench.note("plain .to() per expert", batch=batch, ms=seconds[1] * 1e3, tokens_per_s=batch / seconds[1])


class _Plain:
    def __init__(self, bench: Bench, layer: int) -> None:
        self._bench, self._layer = bench, layer

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in torch.unique(ids).tolist():
            # A copy of the pinned row, since what a user has is pageable.
            blob = self._bench.slab.blob(ExpertId(self._layer, expert)).clone().to(DEVICE)
            views = self._bench.layout.views(blob.unsqueeze(0))
            row, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden[row] @ views["gate_up_proj"][0].T).chunk(2, dim=-1)
            out.index_add_(
                0, row, (torch.nn.functional.silu(gate) * up) @ views["down_proj"][0].T * weights[row, k, None]
            )
        return out


def main() -> None:
    from scripts.bench import offload_small, offload_tiers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="all", help=f"{', '.join(STAGES)}; comma-separated, or all")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="olmoe")
    parser.add_argument("--batches", help="of those that are measured, these alone, comma-separated")
    parser.add_argument("--soak-seconds", type=float, default=60.0)
    parser.add_argument("--commit", default="", help="for machines without git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stages = list(STAGES) if options.stage == "all" else options.stage.split(",")
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    wanted = STEPS if options.batches is None else [int(batch) for batch in options.batches.split(",")]
    batches = {batch: count for batch, count in STEPS.items() if batch in wanted}

    def keep(rows: list[dict[str, Any]]) -> None:
        if options.out is not None:
            result = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": torch.cuda.get_device_name() if CUDA else "CPU, software link",
                "commit": commit,
                "torch": torch.__version__,
                "shape": options.shape,
                "rows": rows,
            }
            write_whole(options.out, (json.dumps(result, indent=1) + "\n").encode())

    bench = Bench(load_trace(options.trace), SHAPES[options.shape], batches, keep=keep)
    run: dict[str, Callable[[], None]] = {
        "copies": lambda: stage_copies(bench),
        "resident": lambda: stage_resident(bench),
        "cached": lambda: stage_cached(bench),
        "peers": lambda: stage_peers(bench),
        "launches": lambda: offload_small.stage_launches(bench),
        "small": lambda: offload_small.stage_small(bench),
        "precision": lambda: offload_small.stage_precision(bench),
        "tiers": lambda: offload_tiers.stage_tiers(bench),
        "soak": lambda: offload_tiers.stage_soak(bench, options.soak_seconds),
    }
    # Who is ended leaves no folder behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with torch.no_grad():
        for stage in stages:
            run[stage]()


if __name__ == "__main__":
    main()
