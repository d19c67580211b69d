"""Copies from memory that CUDA did not pin, plain and through several rings, for `offload.py --stage copies`."""

from __future__ import annotations

import statistics
import time

import torch

from placement.core import ExpertId
from scripts.bench.offload import DEVICE, Bench
from workers.cuda_edge import CHUNK_BYTES, URGENT_CHUNKS, URGENT_THREADS, bounce
from workers.links import CudaLink, Link, Pair
from workers.pinning import host_memory

MOST_BYTES = 400 << 20
GROUP, ROUNDS, SMALL_OPERATIONS = 4, 3, 50
# Chunks, MiB each, threads.
OTHER_RINGS = ((8, 4, 2), (16, 4, 8))


def unpinned_copies(bench: Bench, raw: float) -> None:
    """raw: bytes/s of plain copies from pinned memory."""
    size = bench.layout.num_bytes
    count = max(GROUP, min(32, MOST_BYTES // size))
    memory = host_memory(count, size, pin=False)
    for index, row in enumerate(memory.rows):
        row.copy_(bench.slab.blob(ExpertId(0, index % bench.trace.num_experts)))
    target = torch.empty((count, size), dtype=torch.uint8, device=DEVICE)
    pairs = list(zip(target, memory.rows, strict=True))
    _note(bench, "unpinned, plain copies", CudaLink(DEVICE), pairs, raw)
    for chunks, mib, threads in ((URGENT_CHUNKS, CHUNK_BYTES >> 20, URGENT_THREADS), *OTHER_RINGS):
        link = bounce(
            CudaLink(DEVICE), DEVICE, memory.pinned, num_chunks=chunks, chunk_bytes=mib << 20, num_threads=threads
        )
        target.zero_()
        _note(bench, f"unpinned, ring {chunks} x {mib} MiB, {threads} threads", link, pairs, raw)
        assert torch.equal(target[-1].cpu(), memory.rows[-1])


def _note(bench: Bench, what: str, link: Link, pairs: list[Pair], raw: float) -> None:
    """gbs, of_raw: demand copies in groups. asked_ms: how long a group holds up who asks for it. one_ms: from the
    demand for a single expert until it is there. small_us: an operation on the GPU, launched while copies run."""
    num_bytes = sum(len(target) for target, _ in pairs)
    tiny = torch.zeros(64, device=DEVICE)
    whole, asked, one, small, prefetch = [], [], [], [], []
    link.copy(pairs[:1], after=None, urgent=True).finish()
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        arrivals = []
        for start in range(0, len(pairs), GROUP):
            before = time.perf_counter()
            arrivals.append(link.copy(pairs[start : start + GROUP], after=None, urgent=True))
            asked.append(time.perf_counter() - before)
        for arrival in arrivals:
            arrival.finish()
        whole.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        link.copy(pairs[:1], after=None, urgent=True).finish()
        one.append(time.perf_counter() - begun)
        arrival = link.copy(pairs, after=None, urgent=True)
        begun = time.perf_counter()
        for _ in range(SMALL_OPERATIONS):
            tiny.add_(1)
        small.append((time.perf_counter() - begun) / SMALL_OPERATIONS)
        arrival.finish()
        begun = time.perf_counter()
        link.copy(pairs[:GROUP], after=None, urgent=False).finish()
        prefetch.append(time.perf_counter() - begun)
    link.close()
    rate = num_bytes / statistics.median(whole)
    bench.note(
        what,
        gbs=rate / 1e9,
        of_raw=rate / raw,
        asked_ms=statistics.median(asked) * 1e3,
        one_ms=statistics.median(one) * 1e3,
        small_us=statistics.median(small) * 1e6,
        prefetch_gbs=sum(len(target) for target, _ in pairs[:GROUP]) / statistics.median(prefetch) / 1e9,
    )
