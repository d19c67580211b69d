"""What readers give: pieces of tokens, and notes on what was read, dropped and missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.layers import ModelLayers
from placement.trace import UNKNOWN_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the user says about a source where it does not say so itself; None leaves it to the source.

    num_experts E of a layer; top_k K; moe_layers their absolute indices; sample the share of requests to keep;
    form a name of `detect.Form`, where the source is not to be recognised by itself; num_ranks those that a plan is
    made for: homes beyond them are unknown.
    """

    num_experts: int | None = None
    top_k: int | None = None
    moe_layers: tuple[int, ...] | None = None
    sample: float = 1.0
    counts_key: str | None = None
    form: str | None = None
    num_ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens, as their source has them.

    experts [T, Lh, K]: logical ids of any integer type, -1 where none; dense layers may be among the Lh.
    request, position, step, source_rank, phase, token_id [T] as in `RoutingTrace`. source: file and record, for
    messages. more: what else a RoutingTrace may carry, passed on as it is. num_experts and layers where the source
    says them. stated: the source declares its layers, so none is looked for.
    """

    source: str
    experts: NDArray[Any]
    request: NDArray[np.int64]
    position: NDArray[np.int32]
    step: NDArray[np.int64]
    source_rank: NDArray[np.int32]
    phase: NDArray[np.uint8]
    token_id: NDArray[np.int32] | None = None
    num_experts: int | None = None
    layers: ModelLayers | None = None
    stated: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def filled(num_tokens: int, value: int, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """[T] of one value."""
    return np.full(num_tokens, value, dtype)


def unknown_ranks(num_tokens: int) -> NDArray[np.int32]:
    ranks: NDArray[np.int32] = filled(num_tokens, UNKNOWN_RANK, np.int32)
    return ranks


@dataclass(slots=True, kw_only=True)
class Notes:
    """Filled while a source is read: tokens seen and kept, drops by reason, what it lacks, what was assumed."""

    form: str = ""
    num_files: int = 0
    bytes_read: int = 0
    tokens_seen: int = 0
    tokens_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    num_experts: int = 0
    layers: ModelLayers | None = None
    top_k: int = 0
    sampling_rate: float = 1.0
    lowest_rank: int = 1 << 31
    highest_rank: int = -1

    @property
    def lone_rank(self) -> bool:
        """Whether all tokens came from one rank: the recorder ran there alone, or attention is on all ranks alike."""
        return self.lowest_rank == self.highest_rank

    def drop(self, reason: str, count: int, example: str) -> None:
        """Count what is left out, with where it was first seen."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.examples.setdefault(reason, example)

    def lack(self, what: str) -> None:
        if what not in self.lacks:
            self.lacks.append(what)

    def assume(self, what: str) -> None:
        if what not in self.assumed:
            self.assumed.append(what)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.form,
            "files": self.num_files,
            "bytes_read": self.bytes_read,
            "tokens_seen": self.tokens_seen,
            "tokens_kept": self.tokens_kept,
            "sampling_rate": self.sampling_rate,
            "experts": self.num_experts,
            "top_k": self.top_k,
            "layers": None if self.layers is None else self.layers.to_dict(),
            "dropped": {
                reason: {"count": count, "first": self.examples[reason]} for reason, count in self.dropped.items()
            },
            "lacks": list(self.lacks),
            "assumed": list(self.assumed),
        }

    def sentences(self) -> list[str]:
        """What a person should know, a line each."""
        dropped = [
            f"dropped {count:,}: {reason} (first: {self.examples[reason]})" for reason, count in self.dropped.items()
        ]
        return [
            *dropped,
            *(f"not in this source: {what}" for what in self.lacks),
            *(f"assumed: {a}" for a in self.assumed),
        ]
