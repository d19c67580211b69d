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


class Mapping(mmap.mmap):
    """Memory that is pinned no longer once nobody looks into it: CUDA would refuse to pin what comes to lie there."""

    pinned: list[int]

    def __del__(self) -> None:
        for address in getattr(self, "pinned", []):
            # CUDA may be gone by now.
            with contextlib.suppress(Exception):
                if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:  # type: ignore[no-untyped-call]
                    clear_error()


def host_memory(rows: int, row_bytes: int, *, pin: bool) -> HostRows:
    """[rows, row_bytes] uint8, zeroed; pinned where asked and possible. A refusal by CUDA is a warning."""
    if rows == 0:
        return HostRows(torch.empty((0, row_bytes), dtype=torch.uint8), 0)
    return prepare(Mapping(-1, rows * row_bytes), rows, row_bytes, pin=pin)


def prepare(mapping: Mapping, rows: int, row_bytes: int, *, pin: bool, touch: bool = True) -> HostRows:
    """The beginning of a mapping as rows [n, row_bytes], zeroed if it is to be touched; pinned as in `host_memory`."""
    size = rows * row_bytes
    flat = torch.frombuffer(mapping, dtype=torch.uint8)[:size] if size else torch.empty(0, dtype=torch.uint8)
    parts = torch.split(flat, chunk_rows(row_bytes) * row_bytes)
    if touch:
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            # A page belongs to the NUMA node of the thread that touches it first; zeroing lets go of the GIL.
            list(threads.map(torch.Tensor.zero_, parts))
    num_pinned = _register(mapping, parts) // row_bytes if pin and rows else 0
    return HostRows(flat.view(rows, row_bytes), num_pinned)


def chunk_rows(row_bytes: int) -> int:
    """Rows of a chunk: about 1 GiB, and whole pages.

    CUDA refuses to copy from a range that lies in two registrations, so that no row may cross from one to the next.
    """
    rows_of_whole_pages = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)
    return max(1, CHUNK_BYTES // (row_bytes * rows_of_whole_pages)) * rows_of_whole_pages


def clear_error() -> None:
    """CUDA keeps the error of a refused call, and the next call of torch's that looks would raise it."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.empty(1, device="cuda").fill_(0)


def _register(mapping: Mapping, parts: tuple[torch.Tensor, ...]) -> int:
    """The bytes that CUDA pinned, from the first part on."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    mapping.pinned = []
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
        mapping.pinned.append(part.data_ptr())
        done += part.numel()
    return done
