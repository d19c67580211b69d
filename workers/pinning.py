"""Host memory that a GPU can read at full speed: touched by several threads, then registered with CUDA in chunks."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 30
MOST_THREADS = 16


def host_memory(rows: int, row_bytes: int, *, pin: bool) -> torch.Tensor:
    """[rows, row_bytes] uint8, zeroed; pinned where asked and possible. A refusal by CUDA is a warning."""
    memory = torch.empty((rows, row_bytes), dtype=torch.uint8)
    flat = memory.view(-1)
    parts = torch.split(flat, CHUNK_BYTES) if len(flat) else ()
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        # A page belongs to the NUMA node of the thread that touches it first; zeroing lets go of the GIL.
        list(threads.map(torch.Tensor.zero_, parts))
    if pin:
        _register(parts)
    return memory


def _register(parts: tuple[torch.Tensor, ...]) -> None:
    runtime: Any = torch.cuda.cudart()
    done = 0
    for part in parts:
        error = runtime.cudaHostRegister(part.data_ptr(), part.numel(), 0)
        if int(error) != 0:
            total = sum(other.numel() for other in parts)
            logger.warning(
                "CUDA pinned %.1f of %.1f GiB of expert memory (error %s); copies from the rest run at 5-13 GB/s "
                "and hold up the thread that asks for them; is the locked-memory limit too low?",
                done / 2**30,
                total / 2**30,
                error,
            )
            return
        done += part.numel()
