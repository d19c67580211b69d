"""TensorRT-LLM's expert statistics: a folder of `meta_info.json` and one `rank{r}.safetensors` a rank, counts alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from placement.counts import Counts
from placement.errors import TraceError
from placement.interchange.jsonlines import read_json
from placement.interchange.pieces import Notes
from placement.layers import ModelLayers

META = "meta_info.json"
RANK_FILE = re.compile(r"rank\d+\.safetensors")
KEY = re.compile(r"(\d+)_(\d+)")


def rank_files(folder: Path) -> tuple[Path, ...]:
    """The ranks' files. Others that begin alike, such as rank0_raw.safetensors, are none."""
    return tuple(sorted(path for path in folder.iterdir() if RANK_FILE.fullmatch(path.name)))


def statistics_counts(folder: Path, notes: Notes) -> Counts:
    """Sum over ranks and iterations: load [MoE layers, E]. Raises TraceError that names file, key and value."""
    meta = read_json(folder / META)
    num_experts = meta.get("num_experts") if isinstance(meta, dict) else None
    if type(num_experts) is not int or num_experts < 1:
        raise TraceError(f"{folder / META}: 'num_experts' must be an integer from 1 up, got {str(num_experts)[:40]}")
    files = rank_files(folder)
    if not files:
        raise TraceError(f"{folder}: has {META}, but no rank0.safetensors, rank1.safetensors, ...")
    load: dict[int, Any] = {}
    seen: dict[Path, set[str]] = {}
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                seen[path] = set(file.keys())
                for key in seen[path]:
                    layer = _layer_of(key, path)
                    count = _checked(file.get_tensor(key), num_experts, f"{path}: key '{key}'")
                    load[layer] = load.get(layer, 0.0) + count
        except (OSError, SafetensorError) as error:
            raise TraceError(f"{path}: not a readable .safetensors: {error}") from error
        notes.bytes_read += path.stat().st_size
    if not load:
        raise TraceError(f"{folder}: the files of its {len(files)} ranks hold no counts")
    for path, keys in seen.items():
        missing = set.union(*seen.values()) - keys
        if missing:
            notes.drop("iterations that a rank lacks", len(missing), f"{path}: no key '{sorted(missing)[0]}'")
    layers = ModelLayers(moe=tuple(sorted(load)), num_hidden=max(load) + 1)
    notes.layers, notes.num_experts = layers, num_experts
    notes.top_k = int(meta.get("num_experts_per_token") or 0)
    notes.assume(f"no layer after layer {max(load)} (the files name MoE layers alone)")
    return Counts(load=np.stack([load[layer] for layer in layers.moe]), source=f"counts '{folder}'", layers=layers)


def _layer_of(key: str, path: Path) -> int:
    match = KEY.fullmatch(key)
    if match is None:
        raise TraceError(f"{path}: key '{key[:60]}' is not ITERATION_LAYER, such as '100_3'")
    return int(match[2])


def _checked(count: Any, num_experts: int, where: str) -> Any:
    if count.shape != (num_experts,) or count.dtype.kind not in "ui":
        raise TraceError(
            f"{where}: must be [{num_experts}] integers like 'num_experts', got {count.dtype} {count.shape}"
        )
    if count.min() < 0:
        raise TraceError(f"{where}: expert {int(np.argmin(count))} has a count of {count.min()}; counts are from 0 up")
    return count.astype(np.float64)
