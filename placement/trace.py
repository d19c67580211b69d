"""RoutingTrace: which experts every recorded token chose, and where, when and for whom.

T tokens, L MoE layers, K top-k. On disk a trace is a folder of safetensors segments (written whole, no pickle), or an
`.npz` with `experts`, `request`, `position` and `num_experts`.
"""

from __future__ import annotations

import json
import logging
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from placement.errors import TraceError
from placement.files import write_whole
from placement.layers import ModelLayers, layers_from_dict

logger = logging.getLogger(__name__)

SEGMENT_FORMAT = "moetis-trace/1"
UNKNOWN_RANK = -1
DECODE, PREFILL = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """experts [T, L, K] logical ids; request, position, step, source_rank [T]; phase [T] 0 decode, 1 prefill.

    source_rank is -1 where the source of the trace does not say which rank the token's attention ran on.
    layers: which hidden layers of the model the L layers are, None where that is unknown.
    Raises TraceError where a shape does not fit, an id is out of range, or there is no token.
    """

    num_experts: int
    experts: NDArray[Any]
    request: NDArray[np.int64]
    position: NDArray[np.int32]
    step: NDArray[np.int64]
    source_rank: NDArray[np.int32]
    phase: NDArray[np.uint8]
    token_id: NDArray[np.int32] | None = None
    gate_weight: NDArray[np.float16] | None = None
    workload: NDArray[np.uint8] | None = None
    workload_names: tuple[str, ...] = ()
    model: str = ""
    sampling_rate: float = 1.0
    layers: ModelLayers | None = None

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or 0 in self.experts.shape:
            raise TraceError(
                f"'experts' must be [tokens, layers, top_k] with at least one of each, got {self.experts.shape}"
            )
        if self.experts.dtype.kind not in "ui":
            raise TraceError(f"'experts' must hold integers, got {self.experts.dtype}")
        smallest, largest = int(self.experts.min()), int(self.experts.max())
        if smallest < 0 or largest >= self.num_experts:
            wrong = smallest if smallest < 0 else largest
            token, layer, _ = np.argwhere(self.experts == wrong)[0]
            raise TraceError(
                f"'experts': token {token}, layer {layer} names expert {wrong}; ids go from 0 to {self.num_experts - 1}"
            )
        for name in ("request", "position", "step", "source_rank", "phase", "token_id", "workload"):
            array = getattr(self, name)
            if array is not None and array.shape != (self.num_tokens,):
                raise TraceError(
                    f"'{name}' must be [{self.num_tokens}] like the tokens of 'experts', got {array.shape}"
                )
        if self.layers is not None and len(self.layers.moe) != self.num_layers:
            raise TraceError(f"'layers' names {len(self.layers.moe)} MoE layers, 'experts' has {self.num_layers}")
        if self.gate_weight is not None and self.gate_weight.shape != self.experts.shape:
            raise TraceError(f"'gate_weight' must be {self.experts.shape} like 'experts', got {self.gate_weight.shape}")

    @property
    def num_tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def num_requests(self) -> int:
        return len(np.unique(self.request))

    def select(self, chosen: NDArray[Any]) -> RoutingTrace:
        """The tokens that a mask or an index [n] picks, in that order."""
        kept: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            kept[item.name] = value[chosen] if isinstance(value, np.ndarray) else value
        return RoutingTrace(**kept)

    def split_by_request(self) -> tuple[RoutingTrace, RoutingTrace]:
        """Even request ids to fit on, odd ones to judge on. One parity alone: split in the middle of the sorted ids.

        Raises TraceError where there is only one request, since nothing could be judged then.
        """
        odd = (self.request % 2).astype(bool)
        if odd.all() or not odd.any():
            requests = np.unique(self.request)
            if len(requests) < 2:
                raise TraceError("the trace has one request only; two are needed, one to fit on and one to judge on")
            odd = self.request >= requests[len(requests) // 2]
        return self.select(~odd), self.select(odd)


def concatenate(traces: list[RoutingTrace], *, source: str) -> RoutingTrace:
    """One trace of several of the same model. Raises TraceError, naming source, where L, E or K differ."""
    first = traces[0]
    joined: dict[str, Any] = {}
    for trace in traces:
        mine = (trace.num_layers, trace.num_experts, trace.top_k)
        theirs = (first.num_layers, first.num_experts, first.top_k)
        if mine != theirs:
            raise TraceError(f"{source}: segments of two models: layers, experts, top_k {theirs} and {mine}")
    for item in fields(first):
        values = [getattr(trace, item.name) for trace in traces]
        if isinstance(values[0], np.ndarray) and all(value is not None for value in values):
            joined[item.name] = np.concatenate(values)
        elif any(isinstance(value, np.ndarray) for value in values):
            joined[item.name] = None
    return replace(first, **joined)


def segment_bytes(trace: RoutingTrace) -> bytes:
    """A trace as one safetensors segment."""
    tensors = {
        item.name: np.ascontiguousarray(getattr(trace, item.name))
        for item in fields(trace)
        if isinstance(getattr(trace, item.name), np.ndarray)
    }
    header: dict[str, Any] = {
        "format": SEGMENT_FORMAT,
        "model": trace.model,
        "num_experts": trace.num_experts,
        "sampling_rate": trace.sampling_rate,
        "workload_names": list(trace.workload_names),
    }
    if trace.layers is not None:
        header["layers"] = trace.layers.to_dict()
    data: bytes = save(tensors, metadata={"moetis": json.dumps(header)})
    return data


def write_segment(trace: RoutingTrace, path: Path) -> int:
    """Write a segment whole (temporary file, fsync, rename). Returns its size in bytes."""
    data = segment_bytes(trace)
    write_whole(path, data)
    return len(data)


def read_segment(path: Path) -> RoutingTrace:
    """Read one segment. Raises TraceError that names the file."""
    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {}).get("moetis", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise TraceError(f"{path}: not a readable trace segment: {error}") from error
    if not isinstance(header, dict) or header.get("format") != SEGMENT_FORMAT:
        raise TraceError(f"{path}: not a trace segment of format {SEGMENT_FORMAT}")
    return _build(tensors, header, source=str(path))


def _build(tensors: dict[str, Any], header: dict[str, Any], *, source: str) -> RoutingTrace:
    allowed = {item.name for item in fields(RoutingTrace)} - {"layers"}
    unknown = set(tensors) - allowed
    if unknown:
        raise TraceError(f"{source}: unknown key '{sorted(unknown)[0]}'; a trace has {', '.join(sorted(allowed))}")
    try:
        return RoutingTrace(
            **tensors,
            num_experts=int(header["num_experts"]),
            model=str(header.get("model", "")),
            sampling_rate=float(header.get("sampling_rate", 1.0)),
            workload_names=tuple(str(name) for name in header.get("workload_names", ())),
            layers=layers_from_dict(header["layers"], source=source) if "layers" in header else None,
        )
    except TraceError as error:
        raise TraceError(f"{source}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{source}: a key is missing or of the wrong type: {error}") from error


def load_trace(text: str | Path) -> RoutingTrace:
    """Read a trace: a folder of segments, one segment, or an `.npz`. Raises TraceError that names the file.

    Of a folder, segments that are broken are skipped with a warning.
    """
    path = Path(text)
    if not path.exists():
        raise TraceError(f"trace '{path}': no such file or folder")
    if path.is_dir():
        segments = sorted(path.rglob("*.safetensors"))
        if not segments:
            raise TraceError(f"trace '{path}': the folder has no *.safetensors segment")
        return concatenate(_readable(segments), source=str(path))
    return _load_npz(path) if path.suffix == ".npz" else read_segment(path)


def _readable(segments: list[Path]) -> list[RoutingTrace]:
    """What can be read; a broken segment is skipped with a warning, since the others say enough.

    Raises TraceError where none can be read.
    """
    traces: list[RoutingTrace] = []
    problem: TraceError | None = None
    for segment in segments:
        try:
            traces.append(read_segment(segment))
        except TraceError as error:
            problem = error
            logger.warning("a broken trace segment is skipped: %s", error)
    if not traces:
        assert problem is not None
        raise problem
    return traces


def _load_npz(path: Path) -> RoutingTrace:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TraceError(f"trace '{path}': not a readable .npz: {' '.join(str(error).split())[:200]}") from error
    missing = {"experts", "request", "position", "num_experts"} - set(arrays)
    if missing:
        raise TraceError(
            f"trace '{path}': key '{sorted(missing)[0]}' is missing; found {', '.join(sorted(arrays)) or 'none'}"
        )
    if arrays["num_experts"].size != 1 or arrays["num_experts"].dtype.kind not in "ui":
        raise TraceError(
            f"trace '{path}': key 'num_experts' must be one integer, "
            f"got {arrays['num_experts'].dtype} {arrays['num_experts'].shape}"
        )
    names = arrays.pop("workload_names", np.array([], dtype="U1"))
    header = {
        "num_experts": int(arrays.pop("num_experts").item()),
        "model": path.stem,
        "workload_names": names.tolist(),
    }
    num_tokens = arrays["experts"].shape[0] if arrays["experts"].ndim else 0
    filler = {
        "step": np.zeros(num_tokens, np.int64),
        "source_rank": np.full(num_tokens, UNKNOWN_RANK, np.int32),
        "phase": np.full(num_tokens, DECODE, np.uint8),
    }
    for name in ("request", "position"):
        if arrays[name].dtype.kind not in "ui":
            raise TraceError(f"trace '{path}': key '{name}' must hold integers, got {arrays[name].dtype}")
    arrays["request"] = arrays["request"].astype(np.int64)
    arrays["position"] = arrays["position"].astype(np.int32)
    return _build(filler | arrays, header, source=f"trace '{path}'")
