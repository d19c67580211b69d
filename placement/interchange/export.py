"""Placements as the engines take them: SGLang, vLLM, its Ascend variants, TensorRT-LLM, and EPLB's three arrays.

All of them number slots rank-major, as a Placement does. None but vLLM has a slot without an expert, so that empty
slots are filled with the expert that has fewest copies and none on the rank.
"""

from __future__ import annotations

import io
import json
from enum import StrEnum
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from placement.core import EMPTY, Placement
from placement.errors import ConfigError, PlacementError
from placement.layers import ModelLayers


class Engine(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"
    ASCEND = "ascend"
    TENSORRT = "tensorrt-llm"
    EPLB = "eplb"


# SGLang goes by the suffix: any other text is taken as inline JSON.
SUFFIX = {Engine.SGLANG: ".json"}


def export_placement(placement: Placement, layers: ModelLayers, engine: Engine) -> bytes:
    """A file's bytes. layers: which hidden layers the placement's are. Raises PlacementError where they do not fit."""
    if len(layers.moe) != placement.num_layers:
        raise PlacementError(
            f"the placement has {placement.num_layers} layers, but {len(layers.moe)} MoE layers are named"
        )
    table = placement.physical_to_logical if engine is Engine.VLLM else fill_empty(placement)
    if engine is Engine.SGLANG:
        return _sglang(table, placement, layers)
    if engine is Engine.VLLM:
        return _npy(table.astype(np.int64))
    if engine is Engine.ASCEND:
        return _ascend(table, placement)
    if engine is Engine.TENSORRT:
        return _tensorrt(table, layers)
    return _eplb(table, placement.num_experts)


def check_ranks(placement: Placement, num_ranks: int) -> None:
    """Raises PlacementError where an engine of num_ranks ranks cannot take the plan; the message says what it could."""
    slots = placement.num_slots
    if slots % num_ranks:
        below, above = slots // num_ranks * num_ranks, (slots // num_ranks + 1) * num_ranks
        fitting = [count for count in (below, above) if count >= placement.num_experts]
        raise PlacementError(
            f"{slots} slots per layer do not divide by {num_ranks} ranks; the nearest that do: "
            f"{' and '.join(str(count) for count in fitting)} "
            f"(--slots-per-rank {' or '.join(str(count // num_ranks) for count in fitting)} with a topology of "
            f"{num_ranks} ranks)"
        )
    if num_ranks != placement.num_ranks:
        raise PlacementError(
            f"the plan is for {placement.num_ranks} ranks, the engine has {num_ranks}: plan again with a topology of "
            f"{num_ranks} ranks and --slots-per-rank {slots // num_ranks}"
        )


def fill_empty(placement: Placement) -> NDArray[np.int32]:
    """The table [L, P] with an expert in every slot, none twice on a rank."""
    table = placement.physical_to_logical.copy()
    if not (table == EMPTY).any():
        return table
    held = placement.copies_per_rank().astype(np.int64)
    for layer, slot in np.argwhere(table == EMPTY):
        rank = slot // placement.rows_per_rank
        copies = np.where(held[layer, rank] > 0, np.iinfo(np.int64).max, held[layer].sum(axis=0))
        expert = int(np.argmin(copies))
        table[layer, slot] = expert
        held[layer, rank, expert] += 1
    return table


def _sglang(table: NDArray[np.int32], placement: Placement, layers: ModelLayers) -> bytes:
    """Exactly one key: SGLang passes the whole dictionary on as arguments. Dense layers hold experts in id order."""
    in_order = np.arange(placement.num_slots) % placement.num_experts
    rows = np.tile(in_order, (layers.num_hidden, 1))
    rows[list(layers.moe)] = table
    return (json.dumps({"physical_to_logical_map": rows.tolist()}) + "\n").encode()


def _ascend(table: NDArray[np.int32], placement: Placement) -> bytes:
    """Layers by their number among the MoE layers."""
    by_rank = table.reshape(placement.num_layers, placement.num_ranks, placement.rows_per_rank)
    layer_list = [
        {
            "layer_id": layer,
            "device_count": placement.num_ranks,
            "device_list": [
                {"device_id": rank, "device_expert": experts.tolist()} for rank, experts in enumerate(ranks)
            ],
        }
        for layer, ranks in enumerate(by_rank)
    ]
    return (json.dumps({"moe_layer_count": placement.num_layers, "layer_list": layer_list}) + "\n").encode()


def _tensorrt(table: NDArray[np.int32], layers: ModelLayers) -> bytes:
    """YAML with absolute layer indices, every MoE layer, and nothing else."""
    config: dict[str, Any] = {
        "num_slots": int(table.shape[1]),
        "initial_global_assignments": {layer: row.tolist() for layer, row in zip(layers.moe, table, strict=True)},
        "layer_updates_per_iter": 0,
    }
    return yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=120).encode()


def _eplb(table: NDArray[np.int32], num_experts: int) -> bytes:
    """An `.npz` of what `rebalance_experts` returns: phy2log [L, P], log2phy [L, E, X], logcnt [L, E], all int64."""
    count = np.stack([np.bincount(row, minlength=num_experts) for row in table])
    back = np.full((*count.shape, int(count.max())), EMPTY, np.int64)
    for layer, row in enumerate(table):
        order = np.argsort(row, kind="stable")
        copy = np.arange(len(row)) - np.searchsorted(row[order], row[order])
        back[layer, row[order], copy] = order
    buffer = io.BytesIO()
    np.savez(buffer, phy2log=table.astype(np.int64), log2phy=back, logcnt=count.astype(np.int64))
    return buffer.getvalue()


def _npy(table: NDArray[np.int64]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, table)
    return buffer.getvalue()


def check_suffix(name: str, engine: Engine) -> None:
    """Raises ConfigError where the engine goes by a suffix that the file name lacks."""
    suffix = SUFFIX.get(engine)
    if suffix is not None and not name.endswith(suffix):
        raise ConfigError(f"--out '{name}': {engine} takes a file whose name ends in {suffix}")
