"""What engines write, made by the facts of shared/FORMATS.md: one routing, told in every format."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DENSE = 1
EXPERTS, TOP_K, HIDDEN = 16, 4, 4


def routing(num_tokens: int, seed: int = 0, experts: int = EXPERTS, layers: int = HIDDEN - DENSE) -> NDArray[np.uint8]:
    """[tokens, MoE layers, K]: K different experts a layer."""
    return (
        np.random.default_rng(seed).random((num_tokens, layers, experts)).argsort(axis=2)[:, :, :TOP_K].astype(np.uint8)
    )


def with_dense(chosen: NDArray[Any], value: int = 0) -> NDArray[Any]:
    """The same with a dense layer before it, as an array has it that was never written to there."""
    return np.concatenate([np.full_like(chosen[:, :DENSE], value), chosen], axis=1)


def npy_base64(array: NDArray[Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_response(chosen: NDArray[Any], prompt: int) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": "x", "routed_experts": npy_base64(with_dense(chosen))}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(chosen) - prompt},
    }


def sglang_response(chosen: NDArray[Any], prompt: int, start: int = 0) -> dict[str, Any]:
    """chosen has seq_len - 1 rows; those before start are not returned."""
    data = with_dense(chosen)[start:].astype("<i4").tobytes()
    return {
        "text": "x",
        "meta_info": {
            "prompt_tokens": prompt,
            "completion_tokens": len(chosen) + 1 - prompt,
            "routed_experts": base64.b64encode(data).decode(),
        },
    }


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def slots_of(experts: int = EXPERTS, spare: int = 4, seed: int = 1) -> NDArray[np.int64]:
    """A map [Lh, P] in which every expert has a slot and some have two."""
    rng = np.random.default_rng(seed)
    rows = [
        rng.permutation(np.concatenate([np.arange(experts), rng.permutation(experts)[:spare]])) for _ in range(HIDDEN)
    ]
    return np.stack(rows)


def to_physical(chosen: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[np.int32]:
    """[Lh, tokens, 8] with -1 in dense layers and beside the K choices; a copy is picked by the token's number."""
    num_tokens = len(chosen)
    wide = np.full((HIDDEN, num_tokens, 8), -1, np.int32)
    for layer in range(DENSE, HIDDEN):
        for token in range(num_tokens):
            for place, expert in enumerate(chosen[token, layer - DENSE]):
                copies = np.flatnonzero(slots[layer] == expert)
                wide[layer, token, place] = copies[token % len(copies)]
    return wide


def token_record(
    chosen: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    positions: list[int],
    lens: list[int] | None,
    rank: int = 0,
    number: int = 0,
) -> dict[str, Any]:
    import torch

    physical = to_physical(chosen, slots)
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": torch.from_numpy(physical_count(physical, slots.shape[1])),
        "input_ids": [100 + position for position in positions],
        "positions": positions,
        "extend_seq_lens": lens,
        "forward_mode": 1 if lens is not None else 2,
        "topk_ids_of_layer": torch.from_numpy(physical),
    }


def physical_count(physical: NDArray[np.int32], num_slots: int) -> NDArray[np.int32]:
    return np.stack([np.bincount(row[row >= 0], minlength=num_slots) for row in physical]).astype(np.int32)


def write_dump(path: Path, records: list[dict[str, Any]], slots: NDArray[np.int64]) -> Path:
    import torch

    torch.save({"records": records, "last_physical_to_logical_map": torch.from_numpy(slots)}, path)
    return path


def write_stat(path: Path, count: NDArray[np.int32]) -> Path:
    """count [buffer, Lh, E]."""
    import torch

    value = {"rank": 0, "logical_count": torch.from_numpy(count), "average_utilization_rate_over_window": 0.5}
    torch.save(value, path)
    return path


def write_statistics(folder: Path, count: NDArray[np.int64]) -> Path:
    """TensorRT-LLM: count [ranks, iterations, MoE layers, E]; layers are numbered from DENSE on."""
    folder.mkdir(exist_ok=True)
    meta = {"num_experts": count.shape[-1], "num_experts_per_token": TOP_K}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank, of_rank in enumerate(count):
        tensors = {
            f"{100 + step}_{DENSE + layer}": np.ascontiguousarray(of_rank[step, layer])
            for step in range(of_rank.shape[0])
            for layer in range(of_rank.shape[1])
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
    save_file({"x": np.zeros(2)}, folder / "rank0_raw.safetensors")
    return folder


def router_lines(chosen: NDArray[Any], *, step: int, rank: int = 0) -> list[dict[str, Any]]:
    """Megatron: the lines of one micro-batch."""
    return [
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": rank,
            "num_tokens": len(chosen),
            "topk": chosen.shape[2],
            "top_indices": chosen[:, layer].tolist(),
        }
        for layer in range(chosen.shape[1])
    ]


def own_npz(path: Path, chosen: NDArray[Any], **more: Any) -> Path:
    count = len(chosen)
    arrays: dict[str, Any] = {
        "experts": chosen,
        "request": np.arange(count) // 4,
        "position": np.arange(count) % 4,
        "num_experts": np.int64(EXPERTS),
    }
    np.savez(path, **(arrays | more))
    return path
