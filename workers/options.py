"""What a worker is told when it is made. No torch here: commands that only read a configuration start at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement.fit.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOptions:
    """folder None records nothing. rate is the share of steps kept; the others are limits."""

    folder: Path | None
    rate: float = 1.0
    ring_tokens: int = 65_536
    segment_tokens: int = 16_384
    max_bytes: int = 256_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """model: a folder with a Transformers checkpoint. dtype: a torch type by name; 'auto' is float32 on CPUs, else the
    checkpoint's.

    expert_precision: how experts are kept in host memory and slots, and moved: as the model computes ('stored'), or
    quantised ('int8', 'int4'; docs/offload.md says what that costs in accuracy).
    cache_share: the share of a rank's rows, of all layers together, that its GPU slots hold (one at least).
    prefetch: whether the next layer's router is asked ahead, and what it names fetched while there is time.
    link_bytes_per_s: on a CPU, put a link in software of this bandwidth between experts and slots, to see how a slow
    one does; None copies at once.
    memory_bytes: what this rank may use of its device's memory; None is all that there is. On a CPU, KV cache, slots
    and a layer's tensors are counted against it.
    host_slab_rows: rows of the host slab as a multiple of what the placement needs; a migration's copies take the rest.
    host_slab_gb: host memory for a rank's experts, in 10^9 bytes; those that have no room stay on disk, in the
    checkpoint's own files or, with disk_path, in a file of blobs in that folder. None: all are in memory.
    kv_page_size, kv_pages, max_batch_tokens, max_requests: the paged KV cache and the largest batch.
    kv_offload_gb: host memory, in 10^9 bytes, for the KV cache of requests that must wait since the cache is full;
    without it they are computed anew when their turn comes.
    peer_timeout_s: after this long without an answer a peer counts as lost. meeting_timeout_s: how long to wait for the
    others when groups are formed, and for a step of one's own to end when they are left.
    migration_bytes_per_s: what a rank sends at most when experts move; None is no limit.
    """

    model: Path
    recorder: RecorderOptions
    device: str = "auto"
    dtype: str = "auto"
    expert_precision: Precision = Precision.STORED
    cache_share: float = 0.4
    prefetch: bool = True
    link_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    host_slab_rows: float = 2.0
    host_slab_gb: float | None = None
    disk_path: Path | None = None
    kv_page_size: int = 32
    kv_pages: int = 512
    kv_offload_gb: float = 0.0
    max_batch_tokens: int = 256
    max_requests: int = 64
    threads: int = 1
    peer_timeout_s: float = 60.0
    meeting_timeout_s: float = 20.0
    migration_bytes_per_s: float | None = None
