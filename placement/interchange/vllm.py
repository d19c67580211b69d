"""Per-token routing that vLLM and SGLang return to the client: `.npy` arrays, and API responses in JSON lines.

vLLM gives `[seq_len, hidden layers, K]`, as an array or as base64 of a `.npy` in `choices[].routed_experts`; SGLang
gives base64 of headerless int32 `[seq_len - 1 - start, hidden layers, K]` in `meta_info.routed_experts`.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.errors import TraceError
from placement.interchange.arrays import MAGIC, open_array
from placement.interchange.headerless import Headerless, Response
from placement.interchange.jsonlines import json_lines, one_json
from placement.interchange.own import rows_per_piece
from placement.interchange.pieces import Hints, Notes, Piece, filled, unknown_ranks
from placement.trace import DECODE, PREFILL

NO_ROUTING_IN = "responses without routed_experts"


def array_pieces(files: tuple[Path, ...], notes: Notes) -> Iterator[Piece]:
    """`.npy` files of [seq_len, hidden layers, K], a request each, in slices of 16 MB."""
    _say_what_lacks(notes)
    for number, path in enumerate(files):
        with path.open("rb") as file:
            stream = open_array(file, f"trace '{path}'")
            if len(stream.shape) != 3 or stream.dtype.kind not in "ui":
                raise TraceError(
                    f"trace '{path}': routed experts must be integers [tokens, layers, top_k], "
                    f"got {stream.dtype} {stream.shape}"
                )
            step = rows_per_piece(stream.row_bytes)
            for start in range(0, stream.shape[0], step):
                rows = stream.take(min(step, stream.shape[0] - start))
                yield _piece(f"trace '{path}', from token {start}", rows, number, start, None)
        notes.bytes_read += path.stat().st_size
    notes.lack("prefill and decode apart (all count as decode)")


def response_pieces(files: tuple[Path, ...], hints: Hints, notes: Notes) -> Iterator[Piece]:
    """API responses, one a line (or one JSON file): every choice is a request."""
    _say_what_lacks(notes)
    headerless = Headerless(hints, notes)
    number = 0
    for path in files:
        lines = one_json(path, notes) if path.suffix == ".json" else json_lines(path, notes)
        for where, line in lines:
            found = list(_choices(line, where))
            if not found:
                notes.drop(NO_ROUTING_IN, 1, where)
            for place, (text, tokens) in enumerate(found):
                source = where if len(found) == 1 else f"{where}, choice {place}"
                data = _decoded(text, source)
                if data.startswith(MAGIC):
                    yield _piece(source, _array(data, source), number, 0, tokens[0])
                else:
                    for response, experts in headerless.add(data, tokens, number, source):
                        yield _of_response(response, experts)
                number += 1
    for response, experts in headerless.finish():
        yield _of_response(response, experts)


def _of_response(response: Response, experts: NDArray[Any]) -> Piece:
    start = response.seq_len - 1 - len(experts)
    return _piece(response.source, experts, response.request, start, response.prompt)


def _choices(line: Any, where: str) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    """base64 and (prompt tokens, all tokens) of each choice of a response, of a list of them, or of a batch line."""
    if isinstance(line, list):
        for one in line:
            yield from _choices(one, where)
        return
    if not isinstance(line, dict):
        raise TraceError(f"{where}: a response must be a JSON object, got {str(line)[:60]}")
    body = line.get("response", line)
    body = body.get("body", body) if isinstance(body, dict) else line
    usage = body.get("usage") or {}
    meta = body.get("meta_info") or {}
    candidates = [(meta, meta), (body, usage)]
    choices = body.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if isinstance(choice, dict):
                inner = choice.get("meta_info") or {}
                candidates += [(choice, usage if len(choices) == 1 else {}), (inner, inner or usage)]
    for holder, counts in candidates:
        text = holder.get("routed_experts") if isinstance(holder, dict) else None
        if text is not None:
            if not isinstance(text, str):
                raise TraceError(f"{where}: 'routed_experts' must be base64 text, got {str(text)[:60]}")
            yield text, _token_counts(counts)


def _token_counts(usage: Any) -> tuple[int | None, int | None]:
    prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    answer = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if type(prompt) is not int or prompt < 0:
        return None, None
    return prompt, prompt + answer if type(answer) is int and answer >= 0 else None


def _decoded(text: str, source: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{source}: 'routed_experts' is not base64: {error}") from error


def _array(data: bytes, source: str) -> NDArray[Any]:
    stream = open_array(io.BytesIO(data), f"{source}: 'routed_experts'")
    if len(stream.shape) != 3 or stream.dtype.kind not in "ui":
        raise TraceError(
            f"{source}: 'routed_experts' must be integers [tokens, layers, top_k], got {stream.dtype} {stream.shape}"
        )
    return stream.rest()


def _piece(source: str, experts: NDArray[Any], request: int, start: int, prompt: int | None) -> Piece:
    count = len(experts)
    position = np.arange(start, start + count, dtype=np.int32)
    phase = np.where(position < (prompt or 0), PREFILL, DECODE).astype(np.uint8)
    return Piece(
        source=source,
        experts=experts,
        request=filled(count, request, np.int64),
        position=position,
        step=filled(count, 0, np.int64),
        source_rank=unknown_ranks(count),
        phase=phase,
    )


def _say_what_lacks(notes: Notes) -> None:
    notes.lack("which rank a token's attention ran on (homes count as random)")
    notes.lack("which tokens were served in one step")
