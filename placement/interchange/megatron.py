"""Megatron-LM router traces: `router_trace_rank{r}.jsonl`, a line per (step, block, layer) of a rank's micro-batch.

Rows of a rank's layers belong together within one step; the n-th record of a layer in a step is the n-th micro-batch.
A micro-batch counts as one request: what its sequences are is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from placement.errors import TraceError
from placement.interchange.jsonlines import parsed, raw_lines
from placement.interchange.pieces import Notes, Piece, filled
from placement.interchange.tables import parse_table
from placement.layers import ModelLayers
from placement.trace import PREFILL

TABLE_KEY = b'"top_indices"'
MTP = "records of multi-token prediction layers"
STAGE = "pre_dispatch"
OTHER_STAGE = "records of another stage than pre_dispatch"
LEFT_OVER = "tokens of micro-batches that lack a layer at the end of their file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line: chosen [tokens, K] of one layer. where names file and line."""

    step: int
    rank: int
    layer: int
    chosen: NDArray[np.int32]
    where: str


def router_pieces(files: tuple[Path, ...], notes: Notes) -> Iterator[Piece]:
    """The micro-batches of all ranks. Raises TraceError that names file and line."""
    notes.lack("requests (a micro-batch of a rank counts as one)")
    notes.lack("which rank serves which request (the training rank is taken as home)")
    stage: tuple[int, ...] | None = None
    request = 0
    for path in files:
        layers = layers_in(path, Notes())
        if stage is not None and layers != stage:
            raise TraceError(
                f"{path}: has layers {_short(layers)}, the files before {_short(stage)}: ranks of several pipeline "
                f"stages cannot be joined; give a folder with the ranks of one stage"
            )
        stage = layers
        for batch in _micro_batches(path, layers, notes):
            yield _piece(batch, layers, request)
            request += 1


def layers_in(path: Path, notes: Notes) -> tuple[int, ...]:
    """The decoder layers of a rank: those of its first step."""
    layers: set[int] = set()
    first: int | None = None
    for record in records(path, notes):
        first = record.step if first is None else first
        if record.step != first:
            break
        layers.add(record.layer)
    if not layers:
        raise TraceError(f"{path}: has no record of a decoder layer")
    return tuple(sorted(layers))


def records(path: Path, notes: Notes) -> Iterator[Record]:
    for number, line in raw_lines(path, notes):
        where = f"{path}, line {number}"
        quick = _quick(line)
        value = parsed(line, path, number, notes) if quick is None else quick[0]
        if value is None:
            continue
        if not isinstance(value, dict) or "top_indices" not in value:
            raise TraceError(f"{where}: not a record of a router trace: no 'top_indices'")
        if value.get("block", "decoder") != "decoder" or value.get("stage", STAGE) != STAGE:
            notes.drop(MTP if value.get("stage", STAGE) == STAGE else OTHER_STAGE, 1, where)
            continue
        chosen = _table(value["top_indices"], where) if quick is None else quick[1]
        step, rank, layer = (_number(value, key, where) for key in ("step", "rank", "layer"))
        for key, expected in (("num_tokens", len(chosen)), ("topk", chosen.shape[1])):
            if len(chosen) and key in value and value[key] != expected:
                raise TraceError(f"{where}: '{key}' is {value[key]}, but 'top_indices' is {chosen.shape}")
        yield Record(step=step, rank=rank, layer=layer, chosen=chosen, where=where)


def _quick(line: bytes) -> tuple[Any, NDArray[np.int32]] | None:
    """The fast way: the table parsed apart from the rest of its line. None where the line is anything unusual."""
    key = line.find(TABLE_KEY)
    start = line.find(b"[[", key)
    if key < 0 or start < 0 or line[key + len(TABLE_KEY) : start].strip() != b":" or line.find(TABLE_KEY, start) >= 0:
        return None
    end = line.find(b"]]", start) + 2
    if end < 2 or not line.endswith(b"\n"):
        return None
    chosen = parse_table(line[start:end])
    if chosen is None:
        return None
    try:
        return from_json(line[:start] + b"0" + line[end:]), chosen
    except ValueError:
        return None


def _micro_batches(path: Path, layers: tuple[int, ...], notes: Notes) -> Iterator[list[Record]]:
    """Records joined over layers: a list in layer order for each micro-batch of a step."""
    waiting: dict[int, list[Record]] = {layer: [] for layer in layers}
    step: int | None = None
    for record in records(path, notes):
        if record.step != step:
            _drop_left_over(waiting, notes)
            step = record.step
        if record.layer not in waiting:
            raise TraceError(f"{record.where}: layer {record.layer} is none of this rank's {_short(layers)}")
        waiting[record.layer].append(record)
        if all(waiting.values()):
            batch = [waiting[layer].pop(0) for layer in layers]
            first = batch[0].chosen.shape
            for other in batch:
                if other.chosen.shape != first:
                    raise TraceError(
                        f"{other.where}: layer {other.layer} has {other.chosen.shape[0]} tokens with top_k "
                        f"{other.chosen.shape[1]}, layer {batch[0].layer} of its micro-batch {first[0]} with {first[1]}"
                    )
            if first[0]:
                yield batch
    _drop_left_over(waiting, notes)


def _drop_left_over(waiting: dict[int, list[Record]], notes: Notes) -> None:
    left = max(waiting.values(), key=len, default=[])
    if left:
        notes.drop(LEFT_OVER, sum(len(record.chosen) for record in left), left[0].where)
    for records_of_layer in waiting.values():
        records_of_layer.clear()


def _piece(batch: list[Record], layers: tuple[int, ...], request: int) -> Piece:
    count = len(batch[0].chosen)
    return Piece(
        source=batch[0].where,
        experts=np.stack([record.chosen for record in batch], axis=1),
        request=filled(count, request, np.int64),
        position=np.arange(count, dtype=np.int32),
        step=filled(count, batch[0].step, np.int64),
        source_rank=filled(count, batch[0].rank, np.int32),
        phase=filled(count, PREFILL, np.uint8),
        layers=ModelLayers(moe=layers, num_hidden=layers[-1] + 1),
    )


def _table(value: Any, where: str) -> NDArray[np.int32]:
    try:
        table = np.array(value)
    except ValueError as error:
        raise TraceError(f"{where}: 'top_indices' is no table of one width: {error}") from error
    if table.size == 0:
        return np.zeros((0, 1), np.int32)
    if table.ndim != 2 or table.dtype.kind not in "ui" or table.min() < -1 or table.max() >= 2**31:
        raise TraceError(f"{where}: 'top_indices' must be [tokens, top_k] expert ids, got {table.dtype} {table.shape}")
    return table.astype(np.int32)


def _number(value: dict[str, Any], key: str, where: str) -> int:
    number = value.get(key)
    if type(number) is not int or not 0 <= number < 2**31:
        raise TraceError(f"{where}: '{key}' must be a number from 0 up, got {str(number)[:40]}")
    return number


def _short(layers: tuple[int, ...]) -> str:
    return ", ".join(str(layer) for layer in layers[:6]) + (", ..." if len(layers) > 6 else "")
