"""The sizes that the cost model needs of a model: named, read from its `config.json`, or recognised by its shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.costs import ModelSizes
from placement.errors import ConfigError
from placement.trace import RoutingTrace

MATRICES = 3
BYTES_OF = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
BYTES_QUANTISED = {"fp8": 1.0, "mxfp4": 4.25 / 8, "awq": 0.53, "gptq": 0.53, "bitsandbytes": 0.53}


def sizes_of(*, hidden: int, intermediate: int, weight_bytes: float, activation_bytes: float = 2.0) -> ModelSizes:
    """Sizes of a gated MLP expert: three matrices, one vector of hidden numbers there and one back."""
    weights = MATRICES * hidden * intermediate
    return ModelSizes(
        token_bytes=hidden * activation_bytes, expert_bytes=weights * weight_bytes, pair_flops=2.0 * weights
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """shape: MoE layers, experts, top_k, by which a trace of it is recognised."""

    shape: tuple[int, int, int]
    sizes: ModelSizes


KNOWN = {
    "deepseek-v3": KnownModel(shape=(58, 256, 8), sizes=ModelSizes()),
    "gpt-oss-20b": KnownModel(
        shape=(24, 32, 4), sizes=sizes_of(hidden=2880, intermediate=2880, weight_bytes=BYTES_QUANTISED["mxfp4"])
    ),
    "gpt-oss-120b": KnownModel(
        shape=(36, 128, 4), sizes=sizes_of(hidden=2880, intermediate=2880, weight_bytes=BYTES_QUANTISED["mxfp4"])
    ),
    "mixtral-8x7b": KnownModel(
        shape=(32, 8, 2), sizes=sizes_of(hidden=4096, intermediate=14336, weight_bytes=BYTES_OF["bfloat16"])
    ),
    "qwen3-30b-a3b": KnownModel(
        shape=(48, 128, 8), sizes=sizes_of(hidden=2048, intermediate=768, weight_bytes=BYTES_OF["bfloat16"])
    ),
}
FALLBACK = "deepseek-v3"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSizes:
    """sizes, and origin: where they come from, in words."""

    sizes: ModelSizes
    origin: str


def choose_sizes(model: str | None, trace: RoutingTrace) -> NamedSizes:
    """The sizes of a named model, of a config.json (or its folder), or of the known model that has the trace's shape.

    Falls back to DeepSeek-V3's, and says so. Raises ConfigError where a named one is neither known nor a file.
    """
    if model is not None:
        return named_sizes(model)
    guess = NamedSizes(sizes=KNOWN[FALLBACK].sizes, origin=f"sizes of {FALLBACK}, for want of a better guess (--model)")
    return sizes_by_shape(trace) or guess


def named_sizes(model: str) -> NamedSizes:
    """The sizes of a named model, or of a config.json (or its folder). Raises ConfigError where it is neither."""
    if model in KNOWN:
        return NamedSizes(sizes=KNOWN[model].sizes, origin=f"sizes of {model}")
    return NamedSizes(sizes=read_sizes(Path(model)), origin=f"sizes from {model}")


def sizes_by_shape(trace: RoutingTrace) -> NamedSizes | None:
    """The sizes of the known model that has the trace's shape, if any."""
    shape = (trace.num_layers, trace.num_experts, trace.top_k)
    for name, known in KNOWN.items():
        if known.shape == shape:
            return NamedSizes(sizes=known.sizes, origin=f"sizes of {name}, which has the trace's shape")
    return None


def read_sizes(path: Path) -> ModelSizes:
    """Sizes from a Hugging Face config.json. Raises ConfigError that names file and key."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model '{path}': neither a readable config.json nor one of {', '.join(sorted(KNOWN))}: {error}"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--model '{file}': must be a JSON object")
    text = raw.get("text_config")
    config = raw | text if isinstance(text, dict) else raw
    intermediate = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    return sizes_of(
        hidden=_whole(config, "hidden_size", file),
        intermediate=_whole(config, intermediate, file),
        weight_bytes=_weight_bytes(config, file),
    )


def _whole(config: dict[str, Any], key: str, file: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**7:
        raise ConfigError(f"--model '{file}': key '{key}' must be a whole number from 1 up, got {value!r}")
    return value


def _weight_bytes(config: dict[str, Any], file: Path) -> float:
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        method = quantised.get("quant_method")
        if method not in BYTES_QUANTISED:
            raise ConfigError(
                f"--model '{file}': key 'quantization_config.quant_method' must be one of "
                f"{', '.join(BYTES_QUANTISED)}, got {method!r}"
            )
        return BYTES_QUANTISED[method]
    name = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    if name not in BYTES_OF:
        raise ConfigError(f"--model '{file}': key 'dtype' must be one of {', '.join(BYTES_OF)}, got {name!r}")
    return BYTES_OF[name]
