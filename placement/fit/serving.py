"""Slots of a rank that serves: what its memory leaves for experts beside model, KV cache and workspace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement.errors import ConfigError
from placement.fit.checkpoint import Checkpoint, need
from placement.fit.precision import Precision
from placement.fit.sizing import CACHE_ELEMENT_BYTES, CUDA_CONTEXT_BYTES, GIB, expert_sizes, kv_bytes_per_request

# A layer's own tensors, for each element of a token's copy for each of its experts: gathered, through the two
# products, and summed.
LAYER_BYTES_PER_ELEMENT = 32

MIB = 1 << 20
# Experts that move between GPUs of several machines go through so many buffers of a parcel, and are added up in one
# more (workers/parcels.py).
MOVING_BUFFERS, PARCEL_BYTES = 4 + 1, 128 * MIB
# What NCCL takes for the exchange of a rank, and for experts that move between machines (two H200: docs/multigpu.md).
EXCHANGE_BYTES, MOVING_BYTES = 1000 * MIB, 400 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """memory_bytes: what a rank may use. kv_tokens: of the KV cache, over all requests. rows: the rank's experts, of
    all layers. element_bytes: of a weight as the model computes with it; None as the checkpoint has it.
    on_gpu: whether a CUDA context is to be counted. machines, ranks: how many
    serve together."""

    memory_bytes: float
    kv_tokens: int
    max_batch_tokens: int
    max_requests: int
    rows: int
    precision: Precision
    element_bytes: int | None
    on_gpu: bool
    machines: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFit:
    """slots of slot_bytes each are what the rest leaves of memory_bytes; at most the rank's rows."""

    memory_bytes: float
    model_bytes: int
    kv_bytes: int
    workspace_bytes: int
    slot_bytes: int
    slots: int
    rows: int
    top_k: int

    def arithmetic(self) -> str:
        """The sum in words."""
        return (
            f"{_gib(self.memory_bytes)} of memory - {_gib(self.model_bytes)} model without routed experts - "
            f"{_gib(self.kv_bytes)} KV cache - {_gib(self.workspace_bytes)} workspace leave {self.slots} slots of "
            f"{self.slot_bytes / 1e6:.2f} MB for a rank's {self.rows} experts"
        )


def fit_for_serving(model: Checkpoint, request: ServingRequest, folder: Path) -> ServingFit:
    """Raises ConfigError, with the sum written out, where not one expert has room."""
    hidden = int(need(model.config, folder, "hidden_size"))
    vocabulary = int(need(model.config, folder, "vocab_size"))
    stored_bytes = model.expert_bytes / model.expert_weights
    scale = 1.0 if request.element_bytes is None else request.element_bytes / stored_bytes
    sizes = expert_sizes(model)
    if request.precision is Precision.STORED:
        slot_bytes = int(sizes[Precision.STORED] * scale)
    elif request.precision in sizes:
        slot_bytes = sizes[request.precision]
    else:
        raise ConfigError(
            f"workers.expert_precision is '{request.precision}', which is no smaller than what '{folder}' stores"
        )
    element_bytes = request.element_bytes or stored_bytes
    kv = kv_bytes_per_request(model.config, request.kv_tokens, folder) * element_bytes / CACHE_ELEMENT_BYTES
    layer = request.max_batch_tokens * model.top_k * hidden * LAYER_BYTES_PER_ELEMENT
    workspace = layer + request.max_requests * vocabulary * 4
    if request.on_gpu:
        workspace += CUDA_CONTEXT_BYTES
        # Transformers keeps a mask of a batch's tokens by those of the cache and its own.
        workspace += int(request.max_batch_tokens * (request.kv_tokens + request.max_batch_tokens) * element_bytes)
        workspace += EXCHANGE_BYTES if request.ranks > 1 else 0
        if request.machines > 1:
            workspace += MOVING_BYTES + MOVING_BUFFERS * max(PARCEL_BYTES, slot_bytes)
    resident = int(model.resident_bytes * scale)
    left = request.memory_bytes - resident - kv - workspace
    fit = ServingFit(
        memory_bytes=request.memory_bytes,
        model_bytes=resident,
        kv_bytes=int(kv),
        workspace_bytes=workspace,
        slot_bytes=slot_bytes,
        slots=max(0, min(int(left // slot_bytes), request.rows)),
        rows=request.rows,
        top_k=model.top_k,
    )
    if fit.slots < 1:
        raise ConfigError(
            f"model '{folder}' does not fit: {fit.arithmetic()}; {_gib(-left + slot_bytes)} are missing for one; lower "
            f"workers.kv_pages ({request.kv_tokens} tokens) or max_batch_tokens ({request.max_batch_tokens}), or give "
            f"more memory"
        )
    return fit


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
