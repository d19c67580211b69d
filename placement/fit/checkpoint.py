"""ModelFolder: what a checkpoint holds, by its headers: the routed experts, layer by layer, and all else."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.errors import ConfigError

ONE_EXPERT = re.compile(r"layers\.(\d+)\..*\bexperts\.(\d+)\.(.+)$")
ALL_EXPERTS = re.compile(r"layers\.(\d+)\..*\bexperts\.([a-z_]+)$")
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
PACKED_PER_BYTE = 2
HEADER_LIMIT = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Bytes as stored. layers: numbers of the MoE layers; expert_bytes, expert_weights: the size of one expert."""

    config: dict[str, Any]
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    expert_bytes: int
    expert_weights: int
    resident_bytes: int
    disk_bytes: int

    @property
    def all_experts(self) -> int:
        return len(self.layers) * self.num_experts


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder's config and shard headers.

    Raises ConfigError that names file and tensor where a shard is missing, truncated or no safetensors file, where an
    expert is missing or of another size, or where the config does not say what is needed.
    """
    config = _read_config(folder)
    tensors: dict[str, tuple[int, int]] = {}
    disk = 0
    for shard in _shards(folder):
        disk += shard.stat().st_size
        tensors.update(_read_header(shard))
    num_experts = int(need(config, folder, "num_experts", "num_local_experts", "n_routed_experts"))
    top_k = int(need(config, folder, "num_experts_per_tok", "moe_topk"))
    per_layer = _expert_sizes(tensors, num_experts, folder)
    sizes = set(per_layer.values())
    if len(sizes) != 1:
        raise ConfigError(f"model '{folder}': experts of different layers differ in size: {sorted(sizes)}")
    expert_bytes, expert_weights = sizes.pop()
    total = sum(size for size, _ in tensors.values())
    return Checkpoint(
        config=config,
        layers=tuple(sorted(per_layer)),
        num_experts=num_experts,
        top_k=top_k,
        expert_bytes=expert_bytes,
        expert_weights=expert_weights,
        resident_bytes=total - expert_bytes * num_experts * len(per_layer),
        disk_bytes=disk,
    )


def need(config: dict[str, Any], folder: Path, *keys: str) -> float:
    """The first of the keys that the config has. Raises ConfigError where it has none, or no number there."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int | float) and value > 0:
            return value
    raise ConfigError(f"model '{folder}': config.json: none of {', '.join(keys)} is there as a number above 0")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model '{folder}': config.json cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"model '{folder}': config.json must hold an object, got {type(raw).__name__}")
    nested = raw.get("text_config")
    return nested if isinstance(nested, dict) else raw


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index}: not an index of shards: {error}") from error
        shards = [folder / str(name) for name in names]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"model '{folder}': no *.safetensors file there; other checkpoint formats are not read")
    for shard in shards:
        if not shard.is_file():
            raise ConfigError(f"{shard}: missing, though {index.name} names it")
    return shards


def _read_header(path: Path) -> dict[str, tuple[int, int]]:
    """Bytes and number of elements of each tensor of one shard."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, HEADER_LIMIT):
                raise ConfigError(f"{path}: not a safetensors file: its header would be {length} bytes long")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _tensor(path, name, item, size - 8 - length) for name, item in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a safetensors file: {error}") from error
    return found


def _tensor(path: Path, name: str, item: dict[str, Any], data_bytes: int) -> tuple[int, int]:
    start, end = item["data_offsets"]
    if end > data_bytes:
        raise ConfigError(f"{path}: truncated: tensor '{name}' ends at byte {end} of {data_bytes}")
    elements = 1
    for dimension in item["shape"]:
        elements *= int(dimension)
    width = ELEMENT_BYTES.get(item["dtype"])
    if width is not None and elements * width != end - start:
        raise ConfigError(
            f"{path}: tensor '{name}' is {item['dtype']} {item['shape']}, which is {elements * width} bytes, "
            f"but takes {end - start}"
        )
    return int(end - start), elements * (PACKED_PER_BYTE if name.endswith(("_blocks", "_packed")) else 1)


def _expert_sizes(tensors: dict[str, tuple[int, int]], num_experts: int, folder: Path) -> dict[int, tuple[int, int]]:
    """Bytes and weights of one expert of each MoE layer."""
    parts: dict[int, dict[str, dict[int, tuple[int, int]]]] = {}
    for name, (size, weights) in tensors.items():
        one, whole = ONE_EXPERT.search(name), ALL_EXPERTS.search(name)
        if one:
            parts.setdefault(int(one[1]), {}).setdefault(one[3], {})[int(one[2])] = (size, weights)
        elif whole:
            share = (size // num_experts, weights // num_experts)
            parts.setdefault(int(whole[1]), {})[whole[2]] = dict.fromkeys(range(num_experts), share)
    if not parts:
        raise ConfigError(f"model '{folder}': its shards hold no routed experts (tensors named '...experts...')")
    result = {}
    for layer, by_name in parts.items():
        total_bytes = total_weights = 0
        for name, by_expert in by_name.items():
            lacking = set(range(num_experts)) - set(by_expert)
            if lacking:
                raise ConfigError(f"model '{folder}': layer {layer}, expert {min(lacking)}: tensor '{name}' is missing")
            if len(set(by_expert.values())) > 1:
                raise ConfigError(f"model '{folder}': layer {layer}: '{name}' has not the same size in all experts")
            total_bytes += by_expert[0][0]
            total_weights += by_expert[0][1]
        result[layer] = (total_bytes, total_weights)
    return result
