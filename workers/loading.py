"""Loading a model: the folder is Transformers', the experts go to the host slab, the rest stays with the model.

A worker reads its own experts one by one from the checkpoint's files, and never holds the others (`load_share`). Where
a checkpoint does not allow that (quantised, not safetensors, experts mixed by its conversion), the model is loaded
whole, and its experts are taken from there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from placement.core import Placement
from placement.errors import ConfigError
from workers.expert_source import ExpertSource, ModuleExperts, checkpoint_experts
from workers.filling import fill_tiered
from workers.host_slab import HostSlab
from workers.options import WorkerOptions
from workers.seam import drop_expert_weights, experts_modules, num_experts_of
from workers.shards import open_shards
from workers.shared_slab import shared_slab

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The figures of a model that placement and trace must agree with."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int


def device_of(name: str) -> torch.device:
    """The device of a name; 'auto' is this process's GPU where it has one. A GPU is named with its index."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if name == "auto" else name)


def load_model(options: WorkerOptions, device: torch.device) -> PreTrainedModel:
    """The whole model in host memory, in the worker's dtype. Raises ConfigError that names the folder."""
    config = _read_config(options)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = options.dtype
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    try:
        model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model '{options.model}': cannot be loaded: {str(error).splitlines()[0]}") from error
    frozen: PreTrainedModel = model.eval().requires_grad_(False)
    return frozen


def load_share(options: WorkerOptions, device: torch.device) -> tuple[PreTrainedModel, ExpertSource]:
    """The model without its experts, and where any of them can be read. Raises as `load_model`."""
    config = _read_config(options)
    shards = open_shards(options.model)
    if shards is None or getattr(config, "quantization_config", None) is not None:
        return _whole(options, device)
    dtype = torch.float32 if options.dtype == "auto" and device.type == "cpu" else getattr(torch, options.dtype, None)
    if dtype is None:
        dtype = config.get_text_config().dtype or torch.float32
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    found = checkpoint_experts(shards, skeleton, options.expert_precision)
    if found is None:
        logger.info("model '%s': its experts cannot be read one by one; it is loaded whole", options.model)
        return _whole(options, device)
    experts, others = found
    return _without_experts(options, type(skeleton), config, dtype, {key: shards.lazy(key) for key in others}), experts


def _whole(options: WorkerOptions, device: torch.device) -> tuple[PreTrainedModel, ExpertSource]:
    model = load_model(options, device)
    return model, ModuleExperts(model, options.expert_precision)


def _without_experts(
    options: WorkerOptions,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    tensors: dict[str, Any],
) -> PreTrainedModel:
    """Transformers' own loading, for a class whose experts have no weights."""
    hollow = type(model_class.__name__, (model_class,), {"__init__": _hollow_init(model_class)})
    hollow.__module__ = model_class.__module__
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model: PreTrainedModel = hollow.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)  # type: ignore[attr-defined]
        if (options.model / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(options.model, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model '{options.model}': cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.eval().requires_grad_(False)


def _hollow_init(model_class: type[PreTrainedModel]) -> Callable[..., None]:
    def __init__(self: PreTrainedModel, *arguments: Any, **named: Any) -> None:
        model_class.__init__(self, *arguments, **named)
        for module in experts_modules(self):
            drop_expert_weights(module)

    return __init__


def skeleton_shape(options: WorkerOptions) -> ModelShape:
    """The figures of a model folder, off its config alone: nothing is allocated and no weight is read."""
    config = _read_config(options)
    with torch.device("meta"):
        return shape_of(AutoModelForCausalLM.from_config(config))


def _read_config(options: WorkerOptions) -> PretrainedConfig:
    if not (options.model / "config.json").is_file():
        raise ConfigError(
            f"model '{options.model}': no config.json there; give a folder with a Transformers checkpoint"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(options.model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model '{options.model}': config.json: {str(error).splitlines()[0]}") from error
    return config


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Read a model's MoE figures off its modules and config. Raises ConfigError where its MoE layers differ."""
    modules = experts_modules(model)
    numbers = {num_experts_of(module) for module in modules}
    if len(numbers) > 1:
        raise ConfigError(f"the MoE layers have different numbers of experts: {sorted(numbers)}")
    config = model.config.get_text_config()
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    if top_k is None:
        raise ConfigError(f"model type '{config.model_type}': its config does not say how many experts a token uses")
    return ModelShape(
        num_layers=len(modules), num_experts=numbers.pop(), top_k=int(top_k), hidden_size=int(config.hidden_size)
    )


def check_fits(shape: ModelShape, placement: Placement) -> None:
    """Raises ConfigError where a placement was made for another model."""
    mine = (shape.num_layers, shape.num_experts)
    theirs = (placement.num_layers, placement.num_experts)
    if mine != theirs:
        raise ConfigError(
            f"the model has {mine[0]} MoE layers x {mine[1]} experts, the placement {theirs[0]} x {theirs[1]}"
        )


def fill_slab(
    experts: ExpertSource,
    placement: Placement,
    *,
    rank: int,
    spare: float,
    pin: bool,
    budget_bytes: int | None = None,
    disk_path: Path | None = None,
) -> HostSlab:
    """Read the experts that a rank owns into a new host slab with rows for `spare` times the placement's.

    budget_bytes: memory that it may take; where that is not enough, see `filling.fill_tiered`, which may refuse.
    """
    rows = math.ceil(placement.num_layers * placement.rows_per_rank * spare)
    if budget_bytes is not None and budget_bytes < rows * experts.layout.num_bytes:
        return fill_tiered(
            experts, placement, rank=rank, capacity=rows, budget_bytes=budget_bytes, disk_path=disk_path, pin=pin
        )
    slab = shared_slab(capacity=rows, blob_bytes=experts.layout.num_bytes, pin=pin)
    for expert in sorted(placement.experts_on(rank)):
        experts.read(expert, slab.claim(expert))
        slab.publish(expert)
    return slab
