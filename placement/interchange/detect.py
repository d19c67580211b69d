"""Finding out what a file or folder is, from its names and its first bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from placement.counts import COUNTS_KEY
from placement.errors import TraceError
from placement.interchange.arrays import array_names, open_array, open_npz
from placement.interchange.pieces import Hints
from placement.interchange.tensorrt import META, rank_files

FIRST_LINE_BYTES = 1 << 20


class Form(StrEnum):
    """What a source can be."""

    SEGMENTS = "moetis"
    NPZ = "npz"
    COUNTS = "counts"
    SGLANG = "sglang"
    ARRAYS = "vllm-npy"
    RESPONSES = "responses"
    TENSORRT = "tensorrt-llm"
    MEGATRON = "megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What was found: its form, its files in order, their bytes in all."""

    path: Path
    form: Form
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def find_source(text: str | Path, hints: Hints) -> Source:
    """Look at a file or folder. Raises TraceError that says what was found where nothing fits, or two forms do."""
    path = Path(text)
    if not path.exists():
        raise TraceError(f"trace '{path}': no such file or folder")
    if path.is_dir():
        return _folder(path, hints)
    form = Form(hints.form) if hints.form else _file_form(path, hints)
    return Source(path=path, form=form, files=(path,))


def _file_form(path: Path, hints: Hints) -> Form:
    if hints.counts_key is not None:
        return Form.COUNTS
    suffix = path.suffix
    if suffix == ".npz":
        return _npz_form(path)
    if suffix == ".npy":
        return _npy_form(path)
    if suffix == ".csv":
        return Form.COUNTS
    if suffix == ".pt":
        return Form.SGLANG
    if suffix == ".jsonl":
        return _lines_form(path)
    if suffix == ".json":
        return _json_form(path)
    if suffix == ".safetensors":
        return Form.SEGMENTS
    raise TraceError(
        f"trace '{path}': not a known kind of file; known are .npz, .npy, .csv, .json, .jsonl, .pt, .safetensors and "
        f"folders of them (--format says it otherwise)"
    )


def _npz_form(path: Path) -> Form:
    with open_npz(path) as archive:
        names = set(array_names(archive))
    if "experts" in names:
        return Form.NPZ
    if COUNTS_KEY in names:
        return Form.COUNTS
    raise TraceError(
        f"trace '{path}': has neither 'experts' (a trace) nor '{COUNTS_KEY}'; to plan from counts, name one of "
        f"its keys with --counts-key: {', '.join(sorted(names)) or 'it has none'}"
    )


def _npy_form(path: Path) -> Form:
    """Routed experts come as uint8 or uint16 [tokens, layers, top_k]; counts are wider, or floating."""
    with path.open("rb") as file:
        stream = open_array(file, f"trace '{path}'")
    small = stream.dtype.kind == "u" and stream.dtype.itemsize <= 2
    return Form.ARRAYS if len(stream.shape) == 3 and small else Form.COUNTS


def _lines_form(path: Path) -> Form:
    with path.open("rb") as file:
        head = file.read(FIRST_LINE_BYTES).lstrip().split(b"\n", 1)[0]
    if b'"top_indices"' in head:
        return Form.MEGATRON
    if b'"routed_experts"' in head or b'"choices"' in head or b'"meta_info"' in head or b'"response"' in head:
        return Form.RESPONSES
    raise TraceError(
        f"trace '{path}': its first line is neither a router trace ('top_indices') nor an API response "
        f"('choices', 'meta_info'): {head[:60].decode(errors='replace')!r}"
    )


def _json_form(path: Path) -> Form:
    with path.open("rb") as file:
        head = file.read(FIRST_LINE_BYTES)
    return Form.RESPONSES if b'"choices"' in head or b'"meta_info"' in head else Form.COUNTS


def _folder(path: Path, hints: Hints) -> Source:
    found = _forms_in(path)
    if hints.counts_key is not None:
        raise TraceError(f"counts '{path}': --counts-key names a key of an .npz or .json file, and this is a folder")
    if hints.form:
        found = {form: files for form, files in found.items() if form == hints.form}
    if not found:
        raise TraceError(
            f"trace '{path}': the folder has no *.safetensors segment, and nothing that is known: dumps (*.pt), arrays "
            f"(*.npy), JSON lines (*.jsonl), or {META} with rank0.safetensors"
        )
    if len(found) > 1:
        forms = " and ".join(f"{form} ({files[0].name})" for form, files in found.items())
        raise TraceError(f"trace '{path}': holds {forms}; say which with --format, or name one file")
    ((form, files),) = found.items()
    if form is Form.COUNTS and len(files) > 1:
        raise TraceError(f"trace '{path}': has {len(files)} files of counts ({files[0].name}, ...); name one of them")
    return Source(path=path, form=form, files=files)


def _forms_in(path: Path) -> dict[Form, tuple[Path, ...]]:
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    of = {
        suffix: tuple(file for file in files if file.suffix == suffix) for suffix in (".pt", ".npy", ".jsonl", ".npz")
    }
    found: dict[Form, tuple[Path, ...]] = {}
    if (path / META).is_file():
        found[Form.TENSORRT] = rank_files(path)
    else:
        segments = tuple(sorted(path.rglob("*.safetensors")))
        if segments:
            found[Form.SEGMENTS] = segments
    if of[".pt"]:
        found[Form.SGLANG] = of[".pt"]
    for file in of[".npy"]:
        form = _npy_form(file)
        found[form] = (*found.get(form, ()), file)
    for file in of[".jsonl"]:
        form = _lines_form(file) if file.stat().st_size else Form.RESPONSES
        found[form] = (*found.get(form, ()), file)
    if (path / f"{COUNTS_KEY}.npz").is_file():
        found[Form.COUNTS] = (*found.get(Form.COUNTS, ()), path / f"{COUNTS_KEY}.npz")
    return found
