"""SGLang's expert distribution dumps: `stat` and `per_pass` give counts, `per_token` gives tokens.

Ids in records are physical; a file's `last_physical_to_logical_map` turns them into logical ones. Files are `.pt`,
which only torch can read: this module takes what was read, as dictionaries of numpy arrays and plain numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.counts import Counts
from placement.errors import TraceError
from placement.interchange.pieces import Notes, Piece, filled
from placement.interchange.sequences import Sequences, segments_of
from placement.layers import ModelLayers
from placement.trace import DECODE, PREFILL

ReadDump = Callable[[Path], Any]
ForgetRecord = Callable[[dict[str, Any]], None]
EXTEND = 1
SAME_TOKENS = "tokens that another rank recorded too (attention is not data-parallel)"
NO_TOKENS = "records without tokens"


class Dump(StrEnum):
    STAT = "stat"
    PER_PASS = "per_pass"
    PER_TOKEN = "per_token"


def dump_kind(dump: Any, path: Path) -> Dump:
    """What a dump holds. Raises TraceError where it is none of SGLang's."""
    if isinstance(dump, dict) and "logical_count" in dump:
        return Dump.STAT
    if isinstance(dump, dict) and isinstance(dump.get("records"), list) and "last_physical_to_logical_map" in dump:
        tokens = any(isinstance(record, dict) and "topk_ids_of_layer" in record for record in dump["records"])
        return Dump.PER_TOKEN if tokens else Dump.PER_PASS
    keys = ", ".join(str(key) for key in list(dump)[:8]) if isinstance(dump, dict) else type(dump).__name__
    raise TraceError(
        f"{path}: not an expert distribution dump of SGLang: no 'logical_count' and no 'records' in {keys}"
    )


def dump_counts(files: tuple[Path, ...], read: ReadDump, notes: Notes) -> Counts:
    """Sum of stat or per_pass dumps (of all ranks), MoE layers alone. Raises TraceError that names file and record."""
    total: NDArray[np.float64] | None = None
    for path in files:
        dump = read(path)
        load = _stat_load(dump, path) if dump_kind(dump, path) is Dump.STAT else _pass_load(dump, path, notes)
        if total is not None and load.shape != total.shape:
            raise TraceError(f"{path}: of another model than the files before: {load.shape}, not {total.shape}")
        total = load if total is None else total + load
        notes.bytes_read += path.stat().st_size
    assert total is not None
    moe = np.flatnonzero(total.sum(axis=1))
    if not len(moe):
        raise TraceError(f"{files[0]}: every count is 0; there is nothing to plan from")
    layers = ModelLayers(moe=tuple(moe.tolist()), num_hidden=len(total))
    notes.layers, notes.num_experts = layers, total.shape[1]
    return Counts(load=total[moe], source=f"counts '{files[0]}'" + _and_more(files), layers=layers)


def _and_more(files: tuple[Path, ...]) -> str:
    return f" and {len(files) - 1} more" if len(files) > 1 else ""


def _stat_load(dump: dict[str, Any], path: Path) -> NDArray[np.float64]:
    count = _integers(dump["logical_count"], 3, f"{path}: 'logical_count'")
    if count.min(initial=0) < 0:
        raise TraceError(f"{path}: 'logical_count' holds {count.min()}; counts are from 0 up")
    load: NDArray[np.float64] = count.sum(axis=0, dtype=np.float64)
    return load


def _pass_load(dump: dict[str, Any], path: Path, notes: Notes) -> NDArray[np.float64]:
    logical, num_experts = _map_of(dump, path)
    total = np.zeros(logical.shape, np.float64)
    for index, record in enumerate(dump["records"]):
        where = f"{path}, record {index}"
        if not isinstance(record, dict) or "global_physical_count" not in record:
            raise TraceError(f"{where}: has no 'global_physical_count'")
        count = _integers(record["global_physical_count"], 2, f"{where}: 'global_physical_count'")
        if count.shape != logical.shape or count.min(initial=0) < 0:
            raise TraceError(
                f"{where}: 'global_physical_count' must be counts {logical.shape} like the map, "
                f"got {count.shape}, smallest {count.min(initial=0)}"
            )
        total += count
    load = np.zeros((len(logical), num_experts))
    layer, slot = np.nonzero(logical >= 0)
    np.add.at(load, (layer, logical[layer, slot]), total[layer, slot])
    notes.assume("each file's records were made under its last placement")
    return load


def token_pieces(
    files: tuple[Path, ...], read: ReadDump, notes: Notes, forget: ForgetRecord = lambda record: None
) -> Iterator[Piece]:
    """per_token dumps of all ranks, a record at a time, with logical ids and recovered sequences.

    forget is told of each record that is done with, so that a mapped file need not stay in memory.
    """
    notes.assume("each file's records were made under its last placement")
    sequences = Sequences()
    seen: set[tuple[Any, int]] = set()
    for path in files:
        dump = read(path)
        if dump_kind(dump, path) is not Dump.PER_TOKEN:
            if not dump.get("records"):
                notes.drop("files without records", 1, str(path))
                continue
            raise TraceError(f"{path}: a dump of another kind than the files before, which are per_token")
        logical, num_experts = _map_of(dump, path)
        for index, record in enumerate(dump["records"]):
            where = f"{path}, record {index}"
            if not isinstance(record, dict):
                raise TraceError(f"{where}: must be a dictionary, got {type(record).__name__}")
            piece = _record_piece(record, logical, num_experts, sequences, where)
            if piece is None:
                notes.drop(NO_TOKENS, 1, where)
                continue
            forget(record)
            print_of = (record.get("forward_pass_id"), _fingerprint(piece))
            if print_of in seen:
                notes.tokens_seen += len(piece.experts)
                notes.drop(SAME_TOKENS, len(piece.experts), where)
                continue
            seen.add(print_of)
            yield piece
        notes.bytes_read += path.stat().st_size


def _record_piece(
    record: dict[str, Any], logical: NDArray[np.int64], num_experts: int, sequences: Sequences, where: str
) -> Piece | None:
    physical = _integers(record.get("topk_ids_of_layer"), 3, f"{where}: 'topk_ids_of_layer'")
    positions = _integers(record.get("positions"), 1, f"{where}: 'positions'")
    count = len(positions)
    if len(physical) != len(logical) or physical.shape[1] != count:
        raise TraceError(
            f"{where}: 'topk_ids_of_layer' must be [{len(logical)} layers, {count} tokens, K] like the map and "
            f"'positions', got {physical.shape}"
        )
    if not count or 0 in physical.shape:
        return None
    if positions.min() < 0 or positions.max() >= 2**31:
        raise TraceError(f"{where}: 'positions' go from {positions.min()} to {positions.max()}")
    rank, step = (_number(record, key, where) for key in ("rank", "forward_pass_id"))
    lengths = record.get("extend_seq_lens")
    decode = lengths is None and record.get("forward_mode") != EXTEND
    given = None if lengths is None else _integers(lengths, 1, f"{where}: 'extend_seq_lens'").tolist()
    starts = segments_of(positions, given, decode=decode, source=where)
    return Piece(
        source=where,
        experts=_to_logical(physical, logical, where).transpose(1, 0, 2),
        request=sequences.of_pass(rank, positions, starts, decode=decode),
        position=positions.astype(np.int32),
        step=filled(count, step, np.int64),
        source_rank=filled(count, rank, np.int32),
        phase=filled(count, DECODE if decode else PREFILL, np.uint8),
        token_id=_token_ids(record, count, where),
        num_experts=num_experts,
    )


def _to_logical(physical: NDArray[Any], logical: NDArray[np.int64], where: str) -> NDArray[np.int16]:
    """Ids [Lh, T, K] through the map [Lh, P]; -1 stays -1."""
    num_slots = logical.shape[1]
    wrong = (physical < -1) | (physical >= num_slots)
    if wrong.any():
        layer, token, choice = np.argwhere(wrong)[0]
        raise TraceError(
            f"{where}: layer {layer}, token {token} names physical expert {physical[layer, token, choice]}; "
            f"ids go from 0 to {num_slots - 1} (or -1)"
        )
    with_none = np.concatenate([logical, np.full((len(logical), 1), -1)], axis=1).astype(np.int16)
    # Index -1 takes the last column, which is -1.
    return np.stack([row[ids] for row, ids in zip(with_none, physical, strict=True)])


def _map_of(dump: dict[str, Any], path: Path) -> tuple[NDArray[np.int64], int]:
    """The physical-to-logical map [Lh, P] of a file, and E, its largest id + 1: every expert has a slot."""
    where = f"{path}: 'last_physical_to_logical_map'"
    logical = _integers(dump["last_physical_to_logical_map"], 2, where).astype(np.int64)
    if logical.size == 0 or logical.min() < -1 or not 0 <= logical.max() < 32_768:
        raise TraceError(f"{where}: must be a table [layers, slots] of expert ids, got {logical.shape}")
    return logical, int(logical.max()) + 1


def _integers(value: Any, dims: int, where: str) -> NDArray[Any]:
    """value as an integer array of that many dimensions; lists will do. Raises TraceError."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TraceError(f"{where}: is no table of numbers: {error}") from error
    if array.size == 0 and array.ndim == dims:
        return array.astype(np.int64)
    if array.ndim != dims or array.dtype.kind not in "ui":
        raise TraceError(f"{where}: must be integers in {dims} dimensions, got {array.dtype} {array.shape}")
    return array


def _number(record: dict[str, Any], key: str, where: str) -> int:
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        raise TraceError(f"{where}: '{key}' must be a number from 0 up, got {str(value)[:40]}")
    return value


def _token_ids(record: dict[str, Any], count: int, where: str) -> NDArray[np.int32] | None:
    if record.get("input_ids") is None:
        return None
    ids = _integers(record["input_ids"], 1, f"{where}: 'input_ids'")
    if len(ids) != count:
        raise TraceError(f"{where}: 'input_ids' has {len(ids)} tokens, 'positions' {count}")
    return ids.astype(np.int32)


def _fingerprint(piece: Piece) -> int:
    """Equal for the same tokens with the same routing; taken from their ids, positions and last layer's experts."""
    value = zlib.crc32(piece.experts[:, -1].tobytes())
    for column in (piece.position, piece.token_id):
        if column is not None:
            value = zlib.crc32(column.tobytes(), value)
    return value
