"""How many slots a rank gets where the configuration leaves that to Moetis (`workers.slots: auto`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.config import ClusterConfig
from placement.errors import ConfigError
from placement.fit.checkpoint import read_checkpoint
from placement.fit.serving import ServingRequest, fit_for_serving
from placement.topology import Topology
from workers.options import WorkerOptions

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The allocator's gaps, and what CUDA libraries take for themselves.
GPU_SHARE = 0.9


def sized_options(config: ClusterConfig, topology: Topology, device: str, note: Callable[[str], None]) -> WorkerOptions:
    """The workers' options on this device, with slots by the arithmetic of `moetis fit` where they are to be found out.

    note is told the arithmetic. Raises ConfigError, with the arithmetic, where a rank has no room for a single slot,
    or on CPUs where it is not said how much memory there is, or where a KV cache is to go to host memory from there.
    """
    workers = config.workers
    options = replace(config.worker_options(), device=device)
    if workers.kv_offload_gb and device != "cuda":
        raise ConfigError(
            f"workers.kv_offload_gb is {workers.kv_offload_gb}, but the workers' device is '{device}', whose memory is "
            f"the host's own: leave it out, and raise workers.kv_pages"
        )
    if workers.slots != "auto":
        return options
    if workers.memory_gb is None and device != "cuda":
        raise ConfigError("workers.slots is 'auto' on CPUs: say with workers.memory_gb what a rank may use")
    memory = topology.device.gpu_memory * GPU_SHARE if workers.memory_gb is None else workers.memory_gb * 1e9
    model = read_checkpoint(config.model)
    dtype = "float32" if workers.dtype == "auto" and device != "cuda" else workers.dtype
    fit = fit_for_serving(
        model,
        ServingRequest(
            memory_bytes=memory,
            kv_tokens=workers.kv_page_size * workers.kv_pages,
            max_batch_tokens=workers.max_batch_tokens,
            max_requests=workers.max_requests,
            rows=len(model.layers) * config.slots_per_rank,
            precision=workers.expert_precision,
            element_bytes=ELEMENT_BYTES.get(dtype),
            on_gpu=device == "cuda",
            machines=topology.num_nodes,
            ranks=topology.num_ranks,
        ),
        config.model,
    )
    note(fit.arithmetic())
    if fit.slots < fit.top_k:
        note(f"fewer slots than the {fit.top_k} experts of one token: every layer computes in several waves")
    # Half a slot less, so that rounding up in the worker gives this number of slots and no more.
    return replace(options, cache_share=(fit.slots - 0.5) / fit.rows, memory_bytes=memory)
