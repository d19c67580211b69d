"""The safetensors files of a model folder: which tensor lies where, read whole or one expert at a time."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from placement.errors import ConfigError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Shards:
    """Files stay open, and nothing is read before it is asked for. keys: every tensor's name.

    What is read by `whole` and `row` is read, not mapped: a disk that fails is a ConfigError, and not a signal.
    """

    def __init__(self, folder: Path, files: Mapping[str, list[str]]) -> None:
        self._folder = folder
        self._file_of = {key: name for name, keys in files.items() for key in keys}
        self._open: dict[str, Any] = {}
        self._headers: dict[str, _Header] = {}

    @property
    def keys(self) -> list[str]:
        return list(self._file_of)

    def lazy(self, key: str) -> Any:
        """A slice of safetensors: `[...]` reads the whole, `[i:j]` rows of the first dimension."""
        name = self._file_of[key]
        try:
            if name not in self._open:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            return self._open[name].get_slice(key)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model '{self._folder}': {name}: tensor '{key}' cannot be read: {error}") from error

    def whole(self, key: str) -> torch.Tensor:
        return self._read(key, None)

    def row(self, key: str, index: int) -> torch.Tensor:
        """One row of the first dimension, which is kept: [1, ...]."""
        return self._read(key, index)

    def _read(self, key: str, row: int | None) -> torch.Tensor:
        name = self._file_of[key]
        try:
            if name not in self._headers:
                self._headers[name] = _Header(self._folder / name)
            return self._headers[name].read(key, row)
        except OSError as error:
            raise ConfigError(f"model '{self._folder}': {name}: tensor '{key}' cannot be read: {error}") from error

    def num_rows(self, key: str) -> int:
        return int(self.lazy(key).get_shape()[0])


class _Header:
    """Where the tensors of one file lie, which safetensors has checked already; it stays open."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
        self._tensors: dict[str, Any] = json.loads(os.pread(self._descriptor, length, 8))
        self._start = 8 + length

    def read(self, key: str, row: int | None) -> torch.Tensor:
        """A tensor, or one row of its first dimension, which is kept."""
        entry = self._tensors[key]
        dtype, shape, offset = DTYPES[entry["dtype"]], list(entry["shape"]), self._start + entry["data_offsets"][0]
        if row is not None:
            shape[0] = 1
            offset += row * math.prod(shape) * dtype.itemsize
        raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        read_into(self._descriptor, offset, raw)
        return raw.view(dtype).view(shape)


def read_into(descriptor: int, offset: int, out: torch.Tensor) -> None:
    """Fill out, uint8, from a file at an offset. Raises OSError where the disk fails or the file ends too soon."""
    target, done = out.numpy().data, 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise OSError(f"the file ends at byte {offset + done}, {len(target) - done} bytes too soon")
        done += count


def open_shards(folder: Path) -> Shards | None:
    """The folder's safetensors files, or None where it has none. Raises ConfigError where one is absent or broken."""
    if (folder / SINGLE).is_file():
        names = [SINGLE]
    elif (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"model '{folder}': {INDEX} has no readable 'weight_map': {error!r}") from error
    else:
        return None
    files = {}
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"model '{folder}': {INDEX} names file '{name}', which is not in the folder")
        try:
            with safe_open(folder / name, framework="pt") as file:
                files[name] = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model '{folder}': {name} cannot be read: {error}") from error
    return Shards(folder, files)
