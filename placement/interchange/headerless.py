"""SGLang's headerless routing: int32 [seq_len - 1 - start, hidden layers, K] with no word on layers or K.

Layers x K follows from the first response whose length divides by its tokens. K is the widest group of neighbours
that never names an expert twice (a dense layer, all the same, aside): two layers side by side would soon do so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.errors import TraceError
from placement.interchange.pieces import Hints, Notes

WIDEST_K = 64
ENOUGH_TOKENS = 32
Tokens = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """values [n] of one response, its tokens prompt and answer, its request number; source for messages."""

    values: NDArray[np.int32]
    request: int
    prompt: int | None
    seq_len: int
    source: str


class Headerless:
    """Holds responses back until there are enough tokens to tell the shape from; then gives each [T, Lh, K]."""

    def __init__(self, hints: Hints, notes: Notes) -> None:
        self._hints = hints
        self._notes = notes
        self._waiting: list[Response] = []
        self._shape: tuple[int, int] | None = None
        self._width = 0

    def add(self, data: bytes, tokens: Tokens, request: int, source: str) -> Iterator[tuple[Response, NDArray[Any]]]:
        """One response. Yields what is ready, with its experts [T, Lh, K], which are its last T tokens but one."""
        if len(data) % 4:
            raise TraceError(f"{source}: 'routed_experts' has {len(data)} bytes, not int32 values")
        values = np.frombuffer(data, "<i4")
        if not len(values):
            return
        seq_len = tokens[1]
        if seq_len is None or seq_len < 2:
            raise TraceError(
                f"{source}: 'routed_experts' is headerless, so its shape needs 'prompt_tokens' and 'completion_tokens'"
            )
        if not self._width and len(values) % (seq_len - 1) == 0:
            self._width = len(values) // (seq_len - 1)
        self._waiting.append(Response(values=values, request=request, prompt=tokens[0], seq_len=seq_len, source=source))
        if self._width and sum(len(one.values) for one in self._waiting) >= ENOUGH_TOKENS * self._width:
            yield from self.finish()

    def finish(self) -> Iterator[tuple[Response, NDArray[Any]]]:
        """What waits. Raises TraceError where no shape fits."""
        if not self._waiting:
            return
        if not self._width:
            raise TraceError(f"{self._waiting[0].source}: no shape fits: no response's length divides by its tokens")
        if self._shape is None:
            self._shape = self._find_shape()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            count = len(one.values) // self._width
            if len(one.values) % self._width or count > one.seq_len - 1:
                raise TraceError(
                    f"{one.source}: {len(one.values)} values are no rows of {self._width} for at most "
                    f"{one.seq_len - 1} tokens; of another model than the responses before?"
                )
            yield one, one.values.reshape(count, *self._shape)

    def _find_shape(self) -> tuple[int, int]:
        if self._hints.top_k is not None:
            if self._width % self._hints.top_k:
                raise TraceError(f"--top-k {self._hints.top_k}: a token has {self._width} values, which do not divide")
            return self._width // self._hints.top_k, self._hints.top_k
        values = np.concatenate([one.values for one in self._waiting])
        for top_k in range(min(WIDEST_K, self._width), 0, -1):
            if self._width % top_k == 0 and _never_twice(values.reshape(-1, top_k)):
                break
        self._notes.assume(f"{self._width // top_k} layers with top_k {top_k} (--top-k says it otherwise)")
        return self._width // top_k, top_k


def _never_twice(rows: NDArray[np.int32]) -> bool:
    ordered = np.sort(rows, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    same = ordered[:, 0] == ordered[:, -1]
    return not bool(twice.any(axis=1)[~same].any())
