"""Counts alone, [L, E] or [steps, L, E], from `.npz`, `.npy`, JSON and CSV."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.counts import COUNTS_KEY, Counts
from placement.errors import TraceError
from placement.interchange.arrays import ArrayStream, array_names, open_array, open_member, open_npz
from placement.interchange.jsonlines import read_json
from placement.interchange.own import rows_per_piece
from placement.interchange.pieces import Notes
from placement.layers import ModelLayers, layers_from_dict

JSON_KEYS = (COUNTS_KEY, "logical_count", "load")
LONG_COLUMNS = ("layer", "expert", "count")


def file_counts(path: Path, key: str | None, notes: Notes) -> Counts:
    """Counts of a file, by its suffix. key: which array of an `.npz` or JSON object. Raises TraceError naming both."""
    if not path.is_file():
        raise TraceError(f"counts '{path}': counts come from an .npz, .npy, .json or .csv file")
    notes.bytes_read += path.stat().st_size
    if path.suffix == ".npz":
        counts = _npz(path, key)
    elif path.suffix == ".npy":
        with path.open("rb") as file:
            counts = _summed(open_array(file, f"counts '{path}'"))
    elif path.suffix == ".json":
        counts = _json(path, key)
    elif path.suffix == ".csv":
        counts = _csv(path)
    else:
        raise TraceError(f"counts '{path}': counts come from an .npz, .npy, .json or .csv file")
    notes.num_experts, notes.layers = counts.load.shape[1], counts.layers
    return counts


def _npz(path: Path, key: str | None) -> Counts:
    name = key or COUNTS_KEY
    with open_npz(path) as archive:
        names = array_names(archive)
        if name not in names:
            raise TraceError(f"counts '{path}': key '{name}' is missing; found {', '.join(sorted(names)) or 'none'}")
        layers: ModelLayers | None = None
        if {"moe_layers", "hidden_layers"} <= set(names):
            moe, hidden = (open_member(archive, one, path).rest() for one in ("moe_layers", "hidden_layers"))
            raw = {"moe": moe.tolist(), "hidden": hidden.tolist()}
            layers = layers_from_dict(raw, source=f"counts '{path}'")
        stream = open_member(archive, name, path)
        stream.source = f"counts '{path}': key '{name}'"
        return _summed(stream, layers)


def _summed(stream: ArrayStream, layers: ModelLayers | None = None) -> Counts:
    """[L, E], or the sum of [steps, L, E], read in slices of 16 MB."""
    if stream.dtype.kind not in "uif":
        raise TraceError(f"{stream.source}: must hold numbers, got {stream.dtype}")
    if len(stream.shape) not in (2, 3) or 0 in stream.shape:
        raise TraceError(
            f"{stream.source}: counts must be [layers, experts] or [steps, layers, experts], got {stream.shape}"
        )
    if len(stream.shape) == 2:
        return Counts(load=stream.rest().astype(np.float64), source=stream.source, layers=layers)
    total = np.zeros(stream.shape[1:])
    step = rows_per_piece(stream.row_bytes)
    for start in range(0, stream.shape[0], step):
        rows = stream.take(min(step, stream.shape[0] - start))
        _refuse_negative(rows, start, stream.source)
        total += rows.sum(axis=0, dtype=np.float64)
    return Counts(load=total, source=stream.source, layers=layers)


def _refuse_negative(rows: NDArray[Any], start: int, source: str) -> None:
    wrong = np.argwhere(~(rows >= 0))
    if len(wrong):
        step, layer, expert = wrong[0]
        raise TraceError(
            f"{source}: step {start + step}, layer {layer}, expert {expert} has a count of "
            f"{rows[step, layer, expert]}; counts are from 0 up"
        )


def _json(path: Path, key: str | None) -> Counts:
    value = read_json(path)
    source = f"counts '{path}'"
    if isinstance(value, dict):
        name = key or next((name for name in JSON_KEYS if name in value), COUNTS_KEY)
        if name not in value:
            raise TraceError(f"{source}: key '{name}' is missing; found {', '.join(list(value)[:12]) or 'none'}")
        value, source = value[name], f"{source}: key '{name}'"
    try:
        array = np.array(value)
    except ValueError as error:
        raise TraceError(f"{source}: is no table: its rows differ in length") from error
    return _of_array(array, source)


def _of_array(array: NDArray[Any], source: str) -> Counts:
    if array.dtype.kind not in "uif":
        raise TraceError(f"{source}: must hold numbers alone")
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise TraceError(f"{source}: counts must be [layers, experts] or [steps, layers, experts], got {array.shape}")
    if array.ndim == 3:
        _refuse_negative(array, 0, source)
        array = array.sum(axis=0, dtype=np.float64)
    return Counts(load=array.astype(np.float64), source=source)


def _csv(path: Path) -> Counts:
    """A line a layer, a column an expert; or a header and lines of layer, expert, count (steps are summed)."""
    source = f"counts '{path}'"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            head = next((row for row in reader if row), None)
            if head is None:
                raise TraceError(f"{source}: is empty")
            names = [cell.strip().lower() for cell in head]
            if set(LONG_COLUMNS) <= set(names):
                return _long(reader, names, source)
            rows = [] if any(_number(cell) is None for cell in head) else [head]
            rows += [row for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{source}: cannot be read as CSV: {error}") from error
    if not rows:
        raise TraceError(f"{source}: has a header and no line of counts")
    table = np.zeros((len(rows), len(rows[0])))
    for line, row in enumerate(rows):
        if len(row) != table.shape[1]:
            raise TraceError(f"{source}: layer {line} has {len(row)} columns, layer 0 has {table.shape[1]}")
        for column, cell in enumerate(row):
            value = _number(cell)
            if value is None:
                raise TraceError(f"{source}: layer {line}, expert {column}: '{cell[:40]}' is not a number")
            table[line, column] = value
    return Counts(load=table, source=source)


def _long(reader: Any, names: list[str], source: str) -> Counts:
    columns = [names.index(name) for name in LONG_COLUMNS]
    found: dict[tuple[int, int], float] = {}
    for row in reader:
        if not row:
            continue
        values = [_number(row[column]) if column < len(row) else None for column in columns]
        layer, expert, count = values
        if layer is None or expert is None or count is None or not 0 <= layer < 10_000 or not 0 <= expert < 65_536:
            raise TraceError(f"{source}: line {reader.line_num}: needs {', '.join(LONG_COLUMNS)}, got {row[:6]}")
        if count < 0:
            raise TraceError(f"{source}: line {reader.line_num}: a count of {count}; counts are from 0 up")
        place = int(layer), int(expert)
        found[place] = found.get(place, 0.0) + count
    if not found:
        raise TraceError(f"{source}: has a header and no line of counts")
    table = np.zeros((max(layer for layer, _ in found) + 1, max(expert for _, expert in found) + 1))
    for place, count in found.items():
        table[place] = count
    return Counts(load=table, source=source)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
