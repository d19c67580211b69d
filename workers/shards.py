"""The safetensors files of a model folder: which tensor lies where, read whole or one expert at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from placement.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Shards:
    """Files stay open and mapped, so that nothing is read before it is asked for. keys: every tensor's name."""

    def __init__(self, folder: Path, files: Mapping[str, list[str]]) -> None:
        self._folder = folder
        self._file_of = {key: name for name, keys in files.items() for key in keys}
        self._open: dict[str, Any] = {}

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
        tensor: torch.Tensor = self.lazy(key)[...]
        return tensor

    def row(self, key: str, index: int) -> torch.Tensor:
        """One row of the first dimension, which is kept: [1, ...]."""
        tensor: torch.Tensor = self.lazy(key)[index : index + 1]
        return tensor

    def num_rows(self, key: str) -> int:
        return int(self.lazy(key).get_shape()[0])


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
