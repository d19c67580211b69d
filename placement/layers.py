"""Which hidden layers of a model are MoE layers: engines number hidden layers, a placement has MoE layers alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.errors import ConfigError, InputError, PlacementError

MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """moe: absolute indices of the MoE layers, ascending. num_hidden: all hidden layers, dense ones included.

    Raises PlacementError where the indices do not ascend or lie beyond the hidden layers.
    """

    moe: tuple[int, ...]
    num_hidden: int

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in zip(self.moe, self.moe[1:], strict=False))
        if not self.moe or not ascending or self.moe[0] < 0 or not self.moe[-1] < self.num_hidden <= MOST_LAYERS:
            raise PlacementError(
                f"MoE layers must ascend from 0 to below the {self.num_hidden} hidden layers "
                f"(of {MOST_LAYERS} at most), got {list(self.moe)[:8]}"
            )

    @property
    def dense(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_hidden)) - set(self.moe)))

    def to_dict(self) -> dict[str, Any]:
        return {"moe": list(self.moe), "hidden": self.num_hidden}


def all_moe(num_layers: int) -> ModelLayers:
    """A model without dense layers."""
    return ModelLayers(moe=tuple(range(num_layers)), num_hidden=num_layers)


def layers_from_dict(raw: Any, *, source: str) -> ModelLayers:
    """From what `to_dict` gives. Raises PlacementError that names source."""
    moe, hidden = (raw.get("moe"), raw.get("hidden")) if isinstance(raw, dict) else (None, None)
    if not isinstance(moe, list) or not all(type(layer) is int for layer in moe) or type(hidden) is not int:
        raise PlacementError(f"{source}: layers must be {{'moe': [indices], 'hidden': number}}, got {str(raw)[:80]}")
    try:
        return ModelLayers(moe=tuple(moe), num_hidden=hidden)
    except InputError as error:
        raise PlacementError(f"{source}: {error}") from error


def layers_from_text(text: str, *, option: str) -> tuple[int, ...]:
    """Indices from '3-60' or '0,2,4-8'. Raises ConfigError that names the option."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]) or int(match[2] or match[1]) >= MOST_LAYERS:
            raise ConfigError(f"{option} '{text}': write layers such as 3-60 or 0,2,4-8, below {MOST_LAYERS}")
        found.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(np.unique(found).tolist())
