"""Host memory that a GPU can read at full speed: touched by several threads, then registered with CUDA in chunks."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 30
MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class HostRows:
    """rows [n, row_bytes] uint8. num_pinned: how many a GPU reads at full speed, from the first on."""

    rows: torch.Tensor
    num_pinned: int

    @property
    def is_pinned(self) -> bool:
        """Whether all are."""
        return self.num_pinned == len(self.rows)

    @property
    def pinned(self) -> range:
        """The addresses of what is pinned."""
        start = self.rows.data_ptr()
        return range(start, start + self.num_pinned * self.rows.shape[1])


def host_memory(rows: int, row_bytes: int, *, pin: bool) -> HostRows:
    """[rows, row_bytes] uint8, zeroed; pinned where asked and possible. A refusal by CUDA is a warning."""
    if rows == 0:
        return HostRows(torch.empty((0, row_bytes), dtype=torch.uint8), 0)
    return prepare(torch.frombuffer(mmap.mmap(-1, rows * row_bytes), dtype=torch.uint8), row_bytes, pin=pin)


def prepare(flat: torch.Tensor, row_bytes: int, *, pin: bool, touch: bool = True) -> HostRows:
    """Memory as rows [n, row_bytes], zeroed if it is to be touched; pinned as in `host_memory`."""
    parts = torch.split(flat, chunk_rows(row_bytes) * row_bytes)
    if touch:
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            # A page belongs to the NUMA node of the thread that touches it first; zeroing lets go of the GIL.
            list(threads.map(torch.Tensor.zero_, parts))
    num_pinned = _register(parts) // row_bytes if pin else 0
    return HostRows(flat.view(len(flat) // row_bytes, row_bytes), num_pinned)


def chunk_rows(row_bytes: int) -> int:
    """Rows of a chunk: about 1 GiB, and whole pages.

    CUDA refuses to copy from a range that lies in two registrations, so that no row may cross from one to the next.
    """
    rows_of_whole_pages = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)
    return max(1, CHUNK_BYTES // (row_bytes * rows_of_whole_pages)) * rows_of_whole_pages


def clear_error() -> None:
    """CUDA keeps the error of a refused call, and the next call of torch's that looks would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _register(parts: tuple[torch.Tensor, ...]) -> int:
    """The bytes that CUDA pinned, from the first part on."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    done = 0
    for part in parts:
        error = runtime.cudaHostRegister(part.data_ptr(), part.numel(), 0)
        if int(error) != 0:
            logger.warning(
                "CUDA pinned %.1f of %.1f GiB of expert memory (error %s). Experts in the rest go to the GPU through a "
                "small pinned ring: threads copy each of them once more, which takes cores and memory bandwidth, and "
                "comes to a part of the link's speed (`moetis doctor` measures both). Raise what may be locked "
                "(ulimit -l unlimited, docker run --ulimit memlock=-1) and the container's memory limit, or have less "
                "of it: workers.host_slab_gb",
                done / 2**30,
                sum(other.numel() for other in parts) / 2**30,
                error,
            )
            clear_error()
            break
        done += part.numel()
    return done
