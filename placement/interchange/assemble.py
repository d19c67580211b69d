"""Pieces into one trace: every id checked, dense layers left out, tokens without routing dropped, requests sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.errors import TraceError
from placement.interchange.own import MOST_EXPERTS
from placement.interchange.pieces import Hints, Notes, Piece
from placement.layers import ModelLayers
from placement.trace import UNKNOWN_RANK, RoutingTrace, concatenate

LOOKED_AT = 4096
NO_ROUTING = "tokens without routing in some MoE layer"
PER_TOKEN = ("request", "position", "step", "source_rank", "phase", "token_id")
REPEATED = "tokens that name one expert twice in a layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all pieces of a source share: hidden layers of the array, the MoE ones among them, K.

    picked: which of the array's layers are MoE layers, None for all. layers: how the model numbers them.
    """

    num_rows: int
    picked: tuple[int, ...] | None
    layers: ModelLayers
    top_k: int
    num_experts: int | None


def assemble(pieces: Iterable[Piece], hints: Hints, notes: Notes, model: str = "") -> Iterator[RoutingTrace]:
    """One checked chunk of a trace for each piece that has tokens left.

    A chunk's num_experts is the largest id so far + 1 where neither source nor hints say it; `notes.num_experts` is
    right once all is read. Raises TraceError, naming file and record, for ids out of range, pieces of two models, and
    where nothing is left.
    """
    shape: Shape | None = None
    notes.sampling_rate = hints.sample
    for piece in pieces:
        notes.tokens_seen += len(piece.experts)
        _check_piece(piece)
        if not len(piece.experts):
            continue
        if shape is None:
            shape = _shape_of(piece, hints)
            if shape is None:
                notes.drop(NO_ROUTING, len(piece.experts), piece.source)
                continue
            notes.layers, notes.top_k, notes.num_experts = shape.layers, shape.top_k, shape.num_experts or 0
            if hints.num_experts not in (None, shape.num_experts):
                notes.assume(f"{shape.num_experts} experts a layer, as the source says, not {hints.num_experts}")
        _check_same(piece, shape, hints)
        chunk = _chunk(piece, shape, hints, notes, model)
        if chunk is not None:
            notes.tokens_kept += chunk.num_tokens
            if not piece.stated:
                notes.lowest_rank = min(notes.lowest_rank, int(chunk.source_rank.min()))
                notes.highest_rank = max(notes.highest_rank, int(chunk.source_rank.max()))
            yield chunk
    if not notes.tokens_kept:
        raise TraceError(f"nothing is left of this source: {'; '.join(notes.sentences()) or 'it has no tokens'}")
    assert shape is not None
    if notes.lone_rank and notes.highest_rank >= 0:
        notes.assume(f"homes are unknown: rank {notes.highest_rank} alone has tokens of its own")
    if shape.num_experts is None:
        notes.assume(f"{notes.num_experts} experts a layer (the largest id + 1; --experts says it otherwise)")


def without_homes(trace: RoutingTrace) -> RoutingTrace:
    """The same tokens, with no word on which rank their attention ran on."""
    return replace(trace, source_rank=np.full(trace.num_tokens, UNKNOWN_RANK, np.int32))


def gather(chunks: Iterable[RoutingTrace], notes: Notes, most_bytes: int) -> RoutingTrace:
    """All chunks as one trace of at most about most_bytes: above that, whole requests are left out at random.

    The share kept goes into the trace's sampling_rate and into notes.
    """
    kept: list[RoutingTrace] = []
    size, rate = 0, 1.0
    for chunk in chunks:
        mine = chunk if rate == 1.0 else _sampled(chunk, rate)
        if mine is None:
            continue
        kept.append(mine)
        size += _size(mine)
        while size > most_bytes and rate > 2**-40:
            rate /= 2
            kept = [part for part in (_sampled(one, rate) for one in kept) if part is not None]
            size = sum(_size(part) for part in kept)
    if not kept:
        raise TraceError("a single request of this source is larger than the memory that a trace may take")
    notes.sampling_rate *= rate
    largest = max([notes.num_experts, *(chunk.num_experts for chunk in kept)])
    if rate < 1.0:
        notes.assume(f"{rate:.3g} of the requests are enough (the source is larger than {most_bytes / 1e9:g} GB)")
    same = [replace(chunk, num_experts=largest, sampling_rate=chunk.sampling_rate * rate) for chunk in kept]
    return concatenate(same, source="the source")


def _size(chunk: RoutingTrace) -> int:
    values = (getattr(chunk, item.name) for item in fields(chunk))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def share_of_request(request: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) that looks random and depends on the request alone (splitmix64), [T]."""
    mixed = request.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    share: NDArray[np.float64] = (mixed ^ (mixed >> np.uint64(31))) / 2.0**64
    return share


def _sampled(chunk: RoutingTrace, rate: float) -> RoutingTrace | None:
    keep = share_of_request(chunk.request) < rate
    if keep.all():
        return chunk
    return chunk.select(keep) if keep.any() else None


def _check_piece(piece: Piece) -> None:
    if piece.experts.ndim != 3 or 0 in piece.experts.shape[1:]:
        raise TraceError(f"{piece.source}: experts must be [tokens, layers, top_k], got {piece.experts.shape}")
    if piece.experts.dtype.kind not in "ui":
        raise TraceError(f"{piece.source}: experts must be integers, got {piece.experts.dtype}")


def _shape_of(piece: Piece, hints: Hints) -> Shape | None:
    """What the first tokens say; None where none of them has any routing."""
    num_rows = piece.experts.shape[1]
    sample = piece.experts[:LOOKED_AT]
    top_k = hints.top_k or int((sample >= 0).sum(axis=2).max(initial=0))
    if top_k == 0:
        return None
    if top_k > piece.experts.shape[2]:
        raise TraceError(f"{piece.source}: --top-k {top_k}: the source has {piece.experts.shape[2]} choices a token")
    given = range(num_rows) if piece.stated or piece.layers is not None else hints.moe_layers
    routed = ~_without(sample[:, :, :top_k], dense_too=not piece.stated)
    found = np.flatnonzero(routed.any(axis=0)).tolist() if given is None else list(given)
    if not found:
        return None
    if found[-1] >= num_rows:
        raise TraceError(f"{piece.source}: --moe-layers names layer {found[-1]}, the source has {num_rows} layers")
    whole = len(found) == num_rows
    layers = piece.layers or ModelLayers(moe=tuple(found), num_hidden=num_rows)
    num_experts = piece.num_experts or hints.num_experts
    return Shape(
        num_rows=num_rows, picked=None if whole else tuple(found), layers=layers, top_k=top_k, num_experts=num_experts
    )


def _without(experts: NDArray[Any], *, dense_too: bool) -> NDArray[np.bool_]:
    """[T, L]: a -1 among the K choices or, as an array that was never written to has it, all K the same."""
    missing = np.zeros(experts.shape[:2], bool)
    if experts.dtype.kind == "i":
        missing |= (experts < 0).any(axis=2)
    if dense_too and experts.shape[2] > 1:
        missing |= (experts == experts[:, :, :1]).all(axis=2)
    return missing


def _check_same(piece: Piece, shape: Shape, hints: Hints) -> None:
    rows, columns = piece.experts.shape[1:]
    if rows != shape.num_rows or columns < shape.top_k or (piece.layers or shape.layers) != shape.layers:
        raise TraceError(
            f"{piece.source}: of another model than the files before: {rows} layers and top_k {columns}, "
            f"not {shape.num_rows} and {shape.top_k}"
        )
    if (piece.num_experts or hints.num_experts) != shape.num_experts:
        raise TraceError(
            f"{piece.source}: of another model than the files before: {piece.num_experts} experts a layer, "
            f"not {shape.num_experts}"
        )


def _check_ids(piece: Piece, shape: Shape, hints: Hints) -> None:
    """Raises TraceError, naming the first wrong place, where an id or a layer cannot be."""
    experts = piece.experts
    limit = shape.num_experts or MOST_EXPERTS
    lowest = 0 if piece.stated else -1
    if experts.dtype.kind == "i" and int(experts.min()) < lowest:
        raise _wrong(piece, experts < lowest, f"ids go from 0 to {limit - 1}")
    if int(experts.max()) >= limit:
        raise _wrong(piece, experts >= limit, f"ids go from 0 to {limit - 1}")
    if experts.shape[2] > shape.top_k and experts.dtype.kind == "i" and (experts[:, :, shape.top_k :] >= 0).any():
        extra = np.where(np.arange(experts.shape[2]) >= shape.top_k, experts, -1) >= 0
        raise _wrong(piece, extra, f"a token has {shape.top_k} choices a layer")
    if shape.picked is not None and hints.moe_layers is None:
        others = np.setdiff1d(np.arange(shape.num_rows), shape.picked)
        used = ~_without(experts[:, others, : shape.top_k], dense_too=True)
        if used.any():
            token, layer = np.argwhere(used)[0]
            raise TraceError(
                f"{piece.source}: token {token} has experts in layer {others[layer]}, which was without any before; "
                f"name the MoE layers with --moe-layers"
            )


def _wrong(piece: Piece, where: NDArray[np.bool_], right: str) -> TraceError:
    token, layer, choice = np.argwhere(where)[0]
    value = piece.experts[token, layer, choice]
    return TraceError(f"{piece.source}: token {token}, layer {layer} names expert {value}; {right}")


def _complete(piece: Piece, experts: NDArray[Any], notes: Notes) -> NDArray[np.bool_]:
    """[T]: tokens with K different experts in every MoE layer. The others are counted as dropped."""
    keep = np.ones(len(experts), bool)
    if piece.stated:
        return keep
    missing = _without(experts, dense_too=True).any(axis=1)
    twice = np.zeros(experts.shape[:2], bool)
    for one in range(experts.shape[2]):
        for other in range(one):
            twice |= experts[:, :, one] == experts[:, :, other]
    repeated = twice.any(axis=1) & ~missing
    for reason, which in ((NO_ROUTING, missing), (REPEATED, repeated)):
        if which.any():
            notes.drop(reason, int(which.sum()), f"{piece.source}, token {int(np.argmax(which))}")
    keep[missing | repeated] = False
    return keep


def _chunk(piece: Piece, shape: Shape, hints: Hints, notes: Notes, model: str) -> RoutingTrace | None:
    _check_ids(piece, shape, hints)
    experts = piece.experts if shape.picked is None else piece.experts[:, list(shape.picked)]
    experts = experts[:, :, : shape.top_k]
    keep = _complete(piece, experts, notes)
    if hints.sample < 1.0:
        keep &= share_of_request(piece.request) < hints.sample
    if not keep.any():
        return None
    if shape.num_experts is None:
        notes.num_experts = max(notes.num_experts, int(experts[keep].max()) + 1)
    values: dict[str, Any] = {"model": model, "sampling_rate": 1.0, "layers": shape.layers} | piece.more
    values |= {name: getattr(piece, name) for name in PER_TOKEN if getattr(piece, name) is not None}
    values["experts"] = experts.astype(np.uint8 if notes.num_experts <= 256 else np.uint16, copy=False)
    if not keep.all():
        values = {name: value[keep] if isinstance(value, np.ndarray) else value for name, value in values.items()}
    values["sampling_rate"] *= hints.sample
    return RoutingTrace(**values, num_experts=notes.num_experts)
