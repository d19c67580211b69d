"""Where a worker's experts come from: straight from the checkpoint, expert by expert, or from a model that was loaded.

Checkpoints name and cut experts otherwise than Transformers' modules do (one tensor an expert, gate and up apart).
Transformers knows the conversion of each architecture; here its own converters run on the tensors of one expert at a
time. Only conversions that never mix experts are taken; for others the model is loaded whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from placement.core import ExpertId
from placement.errors import ConfigError
from placement.fit.precision import Precision
from workers.blob import BlobLayout, layout_of
from workers.seam import experts_modules, num_experts_of
from workers.shards import Shards


class ExpertSource(Protocol):
    """Gives any expert of a model as a blob. lasts: as long as the worker lives, at no cost of memory."""

    layout: BlobLayout
    lasts: bool

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        """Write one expert's blob into out, uint8 [layout.num_bytes]."""


class ModuleExperts:
    """The experts of a model that lies in host memory whole, and lets go of them once they are served elsewhere."""

    lasts = False

    def __init__(self, model: PreTrainedModel, precision: Precision = Precision.STORED) -> None:
        self._modules = experts_modules(model)
        self.layout = common_layout(self._modules, precision)

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        self.layout.pack(self._modules[expert.layer], expert.expert, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The checkpoint's tensors behind one parameter of a layer's experts, by the converter's source pattern.

    Each pattern has one tensor of all experts (fused), or one an expert, in the experts' order. converter None: the
    tensor is the parameter itself.
    """

    target: str
    converter: WeightConverter | None
    keys: dict[str, tuple[str, ...]]


class CheckpointExperts:
    """The experts of a model folder, read from its safetensors files one at a time."""

    lasts = True

    def __init__(self, shards: Shards, skeleton: PreTrainedModel, parts: list[list[_Part]], layout: BlobLayout) -> None:
        self._shards = shards
        self._skeleton = skeleton
        self._parts = parts
        self.layout = layout

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        found: dict[str, torch.Tensor] = {}
        for part in self._parts[expert.layer]:
            found |= self._convert(part, expert.expert)
        for field in self.layout.fields:
            tensor = found[field.name]
            assert tensor.shape == (1, *field.shape), (field, tensor.shape)
            field.write(tensor[0], out)

    def _convert(self, part: _Part, expert: int) -> dict[str, torch.Tensor]:
        """{parameter name within the module: [1, ...]} of one expert."""
        read = {pattern: self._read(keys, expert) for pattern, keys in part.keys.items()}
        if part.converter is None:
            (tensor,) = read.values()
            return {part.target.rpartition(".")[2]: tensor}
        converter = deepcopy(part.converter)
        for pattern, tensor in read.items():
            converter.add_tensor(part.target, pattern, pattern, tensor)
        made = converter.convert(part.target, model=self._skeleton, config=self._skeleton.config)
        return {
            name.rpartition(".")[2]: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
        }

    def _read(self, keys: tuple[str, ...], expert: int) -> torch.Tensor:
        return self._shards.row(keys[0], expert) if len(keys) == 1 else self._shards.whole(keys[expert])


def common_layout(modules: list[nn.Module], precision: Precision) -> BlobLayout:
    """The layout that all MoE layers share. Raises ConfigError where they differ."""
    layouts = {layout_of(module, num_experts_of(module), precision) for module in modules}
    if len(layouts) > 1:
        raise ConfigError("the MoE layers keep their experts in different layouts, which the host slab does not hold")
    return layouts.pop()


def checkpoint_experts(
    shards: Shards, skeleton: PreTrainedModel, precision: Precision = Precision.STORED
) -> tuple[CheckpointExperts, list[str]] | None:
    """Where each expert of a model lies, and the keys of all other tensors. skeleton: the model on the meta device.

    None where the checkpoint's experts can't be read one by one. Raises ConfigError as `common_layout`.
    """
    modules = experts_modules(skeleton)
    layout = common_layout(modules, precision)
    names = {id(module): name for name, module in skeleton.named_modules()}
    layer_of = {
        f"{names[id(module)]}.{field.name}": layer for layer, module in enumerate(modules) for field in layout.fields
    }
    mapping = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = skeleton.state_dict()
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    others = []
    for key in sorted(shards.keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, known)
        if target not in known and key in known:
            target, pattern = key, None
        if target in layer_of:
            found[target][key if pattern is None else pattern].append(key)
        else:
            others.append(key)
    parts: list[list[_Part]] = [[] for _ in modules]
    for target, patterns in found.items():
        converter = next((by_pattern[pattern] for pattern in patterns if pattern in by_pattern), None)
        keys = {pattern: tuple(named) for pattern, named in patterns.items()}
        part = _Part(target=target, converter=converter, keys=keys)
        if not _one_by_one(part, shards, num_experts_of(modules[0])):
            return None
        parts[layer_of[target]].append(part)
    if not all(_covers(of_layer, layout) for of_layer in parts):
        return None
    return CheckpointExperts(shards, skeleton, parts, layout), others


def _one_by_one(part: _Part, shards: Shards, num_experts: int) -> bool:
    """Whether one expert's tensors are enough to make its share of the parameter."""
    fused = all(len(keys) == 1 for keys in part.keys.values())
    if fused and any(shards.num_rows(keys[0]) != num_experts for keys in part.keys.values()):
        return False
    if not fused and not all(_numbered(keys, num_experts) for keys in part.keys.values()):
        return False
    if part.converter is None:
        return fused and len(part.keys) == 1
    kept_apart = all(keeps_experts_apart(operation) for operation in part.converter.operations)
    merges = any(isinstance(operation, MergeModulelist) for operation in part.converter.operations)
    return kept_apart and merges != fused


def _numbered(keys: tuple[str, ...], num_experts: int) -> bool:
    """Whether the keys are those of experts 0, 1, 2, ... in order."""
    numbers = [re.findall(r"\.(\d+)\.", key) for key in keys]
    return [int(each[-1]) if each else -1 for each in numbers] == list(range(num_experts))


def keeps_experts_apart(operation: Any) -> bool:
    """Whether an operation of a converter can run on one expert's tensors alone."""
    if isinstance(operation, MergeModulelist):
        return bool(operation.dim == 0)
    if isinstance(operation, Concatenate | Chunk | Interleave):
        return bool(operation.dim != 0)
    return isinstance(operation, Transpose) and 0 not in (operation.dim0, operation.dim1)


def _covers(parts: list[_Part], layout: BlobLayout) -> bool:
    """Whether the parts of a layer make every field; a converter with several targets makes them all."""
    made = {part.target.rpartition(".")[2] for part in parts}
    for part in parts:
        if part.converter is not None:
            made |= {pattern.rpartition(".")[2] for pattern in part.converter.target_patterns}
    return made >= {field.name for field in layout.fields}
