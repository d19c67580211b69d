"""The project's own traces, piece by piece: an `.npz` of any size, and folders of safetensors segments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from placement.errors import TraceError
from placement.interchange.arrays import ArrayStream, array_names, open_member, open_npz
from placement.interchange.pieces import Notes, Piece, filled, unknown_ranks
from placement.layers import ModelLayers, layers_from_dict
from placement.trace import DECODE, SEGMENT_FORMAT

PIECE_BYTES = 1 << 24
MOST_EXPERTS = 65_535
NEEDED = ("experts", "request", "position", "num_experts")
PER_TOKEN = ("request", "position", "step", "source_rank", "phase", "token_id", "workload")
TYPES: dict[str, Any] = {
    "request": np.int64,
    "position": np.int32,
    "step": np.int64,
    "source_rank": np.int32,
    "phase": np.uint8,
    "token_id": np.int32,
    "workload": np.uint8,
}
KNOWN = {*NEEDED, *PER_TOKEN, "gate_weight", "workload_names", "moe_layers", "hidden_layers"}


def rows_per_piece(row_bytes: int) -> int:
    """Tokens of a piece of 16 MB."""
    return max(1, PIECE_BYTES // max(1, row_bytes))


def npz_pieces(path: Path, notes: Notes) -> Iterator[Piece]:
    """An `.npz` with `experts`, `request`, `position`, `num_experts`; other arrays of a RoutingTrace may be there."""
    where = f"trace '{path}'"
    with open_npz(path) as archive:
        names = array_names(archive)
        for name in NEEDED:
            if name not in names:
                raise TraceError(f"{where}: key '{name}' is missing; found {', '.join(sorted(names)) or 'none'}")
        unknown = sorted(set(names) - KNOWN)
        if unknown:
            raise TraceError(f"{where}: unknown key '{unknown[0]}'; a trace has {', '.join(sorted(KNOWN))}")
        streams = {name: open_member(archive, name, path) for name in names}
        num_experts = _expert_count(_one_integer(streams.pop("num_experts")), where)
        workloads = streams.pop("workload_names", None)
        layers = _layers_of(streams, where)
        experts = streams.pop("experts")
        if len(experts.shape) != 3 or 0 in experts.shape:
            raise TraceError(
                f"{where}: 'experts' must be [tokens, layers, top_k] with at least one of each, got {experts.shape}"
            )
        _check_columns(streams, experts, where)
        more: dict[str, Any] = {"model": path.stem}
        if workloads is not None:
            more["workload_names"] = tuple(str(name) for name in workloads.rest().tolist())
        for start in range(0, experts.shape[0], rows_per_piece(experts.row_bytes)):
            count = min(rows_per_piece(experts.row_bytes), experts.shape[0] - start)
            columns = {name: _as_type(name, stream, stream.take(count)) for name, stream in streams.items()}
            notes.bytes_read += count * (experts.row_bytes + sum(stream.row_bytes for stream in streams.values()))
            yield _piece(f"{where}, from token {start}", experts.take(count), columns, num_experts, layers, more)
    _say_what_lacks(set(names), notes)


def segment_pieces(files: tuple[Path, ...], notes: Notes) -> Iterator[Piece]:
    """Segments, each in slices of 16 MB at most. Raises TraceError that names the file."""
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                header = json.loads((file.metadata() or {}).get("moetis", "{}"))
                if not isinstance(header, dict) or header.get("format") != SEGMENT_FORMAT:
                    raise TraceError(f"{path}: not a trace segment of format {SEGMENT_FORMAT}")
                yield from _slices(path, file, header)
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise TraceError(f"{path}: not a readable trace segment: {error}") from error
        notes.bytes_read += path.stat().st_size


def _slices(path: Path, file: Any, header: dict[str, Any]) -> Iterator[Piece]:
    where = str(path)
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    allowed = {"experts", "gate_weight", *PER_TOKEN}
    unknown, missing = set(slices) - allowed, {"experts", "request", "position"} - set(slices)
    if unknown:
        raise TraceError(f"{where}: unknown key '{sorted(unknown)[0]}'; a trace has {', '.join(sorted(allowed))}")
    if missing:
        raise TraceError(f"{where}: key '{sorted(missing)[0]}' is missing")
    shape = tuple(slices["experts"].get_shape())
    if len(shape) != 3 or 0 in shape:
        raise TraceError(f"{where}: 'experts' must be [tokens, layers, top_k] with at least one of each, got {shape}")
    for name, column in slices.items():
        if tuple(column.get_shape())[:1] != shape[:1] or (name in PER_TOKEN and len(column.get_shape()) != 1):
            raise TraceError(f"{where}: '{name}' must be [{shape[0]}] like the tokens of 'experts'")
    try:
        num_experts = _expert_count(int(header["num_experts"]), where)
        more: dict[str, Any] = {
            "model": str(header.get("model", "")),
            "sampling_rate": float(header.get("sampling_rate", 1.0)),
            "workload_names": tuple(str(name) for name in header.get("workload_names", ())),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{where}: a key is missing or of the wrong type: {error}") from error
    layers = layers_from_dict(header["layers"], source=where) if "layers" in header else None
    step = rows_per_piece(shape[1] * shape[2])
    for start in range(0, shape[0], step):
        columns = {name: column[start : min(start + step, shape[0])] for name, column in slices.items()}
        yield _piece(f"{where}, from token {start}", columns.pop("experts"), columns, num_experts, layers, more)


def _piece(
    source: str,
    experts: NDArray[Any],
    columns: dict[str, NDArray[Any]],
    num_experts: int,
    layers: ModelLayers | None,
    more: dict[str, Any],
) -> Piece:
    count = len(experts)
    fill: dict[str, NDArray[Any]] = {
        "step": filled(count, 0, np.int64),
        "source_rank": unknown_ranks(count),
        "phase": filled(count, DECODE, np.uint8),
    }
    named = {name: columns[name] for name in PER_TOKEN if name in columns and name != "workload"}
    others = {name: columns[name] for name in ("workload", "gate_weight") if name in columns}
    return Piece(
        source=source,
        experts=experts,
        num_experts=num_experts,
        layers=layers,
        stated=True,
        more=more | others,
        **(fill | named),
    )


def _one_integer(stream: ArrayStream) -> int:
    value = stream.rest() if np.prod(stream.shape) == 1 else None
    if value is None or value.dtype.kind not in "ui":
        raise TraceError(f"{stream.source} must be one integer, got {stream.dtype} {stream.shape}")
    return int(value.item())


def _expert_count(value: int, where: str) -> int:
    if not 1 <= value <= MOST_EXPERTS:
        raise TraceError(f"{where}: key 'num_experts' must be from 1 to {MOST_EXPERTS}, got {value}")
    return value


def _layers_of(streams: dict[str, ArrayStream], where: str) -> ModelLayers | None:
    moe, hidden = streams.pop("moe_layers", None), streams.pop("hidden_layers", None)
    if moe is None or hidden is None:
        return None
    return layers_from_dict({"moe": moe.rest().tolist(), "hidden": _one_integer(hidden)}, source=where)


def _check_columns(streams: dict[str, ArrayStream], experts: ArrayStream, where: str) -> None:
    for name, stream in streams.items():
        if name in PER_TOKEN and stream.dtype.kind not in "ui":
            raise TraceError(f"{where}: key '{name}' must hold integers, got {stream.dtype}")
        expected = experts.shape if name == "gate_weight" else experts.shape[:1]
        if stream.shape != expected:
            raise TraceError(
                f"{where}: '{name}' must be {list(expected)} like the tokens of 'experts', got {stream.shape}"
            )


def _as_type(name: str, stream: ArrayStream, rows: NDArray[Any]) -> NDArray[Any]:
    if name == "gate_weight":
        return rows
    limit = np.iinfo(TYPES[name])
    if rows.size and not (int(rows.min()) >= limit.min and int(rows.max()) <= limit.max):
        raise TraceError(
            f"{stream.source} goes from {rows.min()} to {rows.max()}; {limit.min} to {limit.max} can be kept"
        )
    return rows.astype(TYPES[name], copy=False)


def _say_what_lacks(names: set[str], notes: Notes) -> None:
    if "source_rank" not in names:
        notes.lack("which rank a token's attention ran on (homes count as random)")
    if "phase" not in names:
        notes.lack("prefill and decode apart (all count as decode)")
