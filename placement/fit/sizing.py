"""Sizing: what stays on the GPU, how many expert slots remain, and how fast the host link lets it be.

Per step of B tokens a MoE layer reads E * (1 - (1 - k/E) ** B) different experts. The part that misses the slots comes
over the host link, the rest is read from GPU memory; the two overlap at best, so a step takes the longer of both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from placement.errors import ConfigError
from placement.fit.checkpoint import Checkpoint, need
from placement.fit.precision import BLOB_ALIGNMENT, Precision, aligned, quantised_blob_bytes

GIB = 1 << 30
CUDA_CONTEXT_BYTES = 600 << 20
PREFILL_CHUNK_TOKENS = 2048
CACHE_ELEMENT_BYTES = 2
HIT_RATES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """Memory in bytes, bandwidths in bytes/s, context in tokens a request, batch in requests at once."""

    gpu_bytes: float
    context: int
    batch: int
    link_bandwidth: float
    hbm_bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFit:
    """One way to keep experts. tokens_per_s: upper bounds by hit rate; host_bytes: all experts in host memory."""

    precision: str
    expert_bytes: int
    slots: int
    share: float
    host_bytes: int
    tokens_per_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes on the GPU and what is left for slots. waves: fewer slots than one token's experts of a layer."""

    gpu_bytes: float
    resident_bytes: int
    kv_bytes: int
    workspace_bytes: int
    left_bytes: float
    experts: int
    top_k: int
    disk_bytes: int
    precisions: tuple[PrecisionFit, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_model(model: Checkpoint, request: FitRequest, folder: Path) -> Fit:
    """Raises ConfigError, with the sum written out, where not one expert at the smallest precision would have room."""
    kv = kv_bytes_per_request(model.config, request.context, folder) * request.batch
    workspace = _workspace_bytes(model, request, folder)
    left = request.gpu_bytes - model.resident_bytes - kv - workspace
    sizes = expert_sizes(model)
    if left < min(sizes.values()):
        raise ConfigError(
            f"model '{folder}' does not fit: {_gib(model.resident_bytes)} that stay on the GPU + {_gib(kv)} KV cache "
            f"({request.batch} x {request.context} tokens) + {_gib(workspace)} workspace + one expert of "
            f"{min(sizes.values()) / 1e6:.1f} MB > {_gib(request.gpu_bytes)}; lower --context or --batch"
        )
    return Fit(
        gpu_bytes=request.gpu_bytes,
        resident_bytes=model.resident_bytes,
        kv_bytes=kv,
        workspace_bytes=workspace,
        left_bytes=left,
        experts=model.all_experts,
        top_k=model.top_k,
        disk_bytes=model.disk_bytes,
        precisions=tuple(_precision(name, size, left, model, request) for name, size in sizes.items()),
    )


def expert_sizes(model: Checkpoint) -> dict[str, int]:
    """Blob bytes of one expert by precision, as workers keep it: gate and up in one matrix, and down.

    Biases are not told from weights, and count as if they were quantised too.
    """
    hidden = int(model.config.get("hidden_size", 1))
    intermediate = model.expert_weights // (3 * hidden)
    matrices = ((2 * intermediate, hidden), (hidden, intermediate))
    sizes = {Precision.STORED.value: aligned(model.expert_bytes, BLOB_ALIGNMENT)}
    for precision in (Precision.INT8, Precision.INT4):
        size = quantised_blob_bytes(precision, matrices)
        if size < sizes[Precision.STORED]:
            sizes[precision.value] = size
    return sizes


def kv_bytes_per_request(config: dict[str, Any], context: int, folder: Path) -> int:
    """Keys and values in 16 bits as Transformers keeps them: whole heads (latent attention too), sliding layers cut."""
    layers = int(need(config, folder, "num_hidden_layers"))
    heads = int(need(config, folder, "num_attention_heads"))
    if config.get("kv_lora_rank"):
        width = int(need(config, folder, "qk_nope_head_dim") + need(config, folder, "qk_rope_head_dim"))
        per_token = heads * (width + int(need(config, folder, "v_head_dim")))
    else:
        head_dim = int(config.get("head_dim") or need(config, folder, "hidden_size") // heads)
        per_token = 2 * int(config.get("num_key_value_heads") or heads) * head_dim
    kinds = config.get("layer_types") or []
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    window = min(context, int(config.get("sliding_window") or context))
    return int(CACHE_ELEMENT_BYTES * per_token * ((layers - sliding) * context + sliding * window))


def union_of_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Different experts that a layer reads for so many tokens whose choices are independent and even."""
    return float(num_experts * (1 - (1 - top_k / num_experts) ** tokens))


def _workspace_bytes(model: Checkpoint, request: FitRequest, folder: Path) -> int:
    hidden = int(need(model.config, folder, "hidden_size"))
    vocabulary = int(need(model.config, folder, "vocab_size"))
    intermediate = model.expert_weights // (3 * hidden)
    chunk = PREFILL_CHUNK_TOKENS * (8 * hidden + model.top_k * (2 * hidden + 3 * intermediate)) * 2
    return CUDA_CONTEXT_BYTES + chunk + request.batch * vocabulary * 4


def _precision(name: str, size: int, left: float, model: Checkpoint, request: FitRequest) -> PrecisionFit:
    slots = min(int(left // size), model.all_experts)
    union = union_of_experts(model.num_experts, model.top_k, request.batch)
    bounds = {}
    for hit_rate in (*HIT_RATES, 1.0):
        link = len(model.layers) * union * size * (1 - hit_rate) / request.link_bandwidth
        memory = (model.resident_bytes + len(model.layers) * union * size) / request.hbm_bandwidth
        bounds[f"{hit_rate:.2f}"] = request.batch / max(link, memory)
    return PrecisionFit(
        precision=name,
        expert_bytes=size,
        slots=slots,
        share=slots / model.all_experts,
        host_bytes=size * model.all_experts,
        tokens_per_s=bounds,
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
