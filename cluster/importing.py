"""What `moetis import` does: a source of any size to a folder of trace segments, or to a file of counts."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster import offline
from cluster.sources import Opened, open_source, tell
from placement.counts import COUNTS_KEY, Counts
from placement.errors import ConfigError
from placement.files import write_whole
from placement.interchange.assemble import without_homes
from placement.interchange.pieces import Hints, Notes
from placement.trace import RoutingTrace, concatenate, read_segment, write_segment

SEGMENT_BYTES = 1 << 24


def sampled_share(text: str) -> float:
    """A share of the requests; 100% is all. Raises ConfigError."""
    return 1.0 if text in ("100%", "1", "1.0") else offline.share_of(text, "--sample")


def import_source(text: str, out: str, hints: Hints) -> dict[str, Any]:
    """Write DIR/part-*.safetensors, or DIR/counts.npz, and say what came of it. Raises TraceError and ConfigError."""
    folder = _empty_folder(out)
    opened = open_source(text, hints)
    if opened.counts is not None and hints.sample < 1.0:
        raise ConfigError("--sample: this source has counts alone, which are sums already; leave it out")
    made = not folder.exists()
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    try:
        if opened.counts is not None:
            _write_counts(opened.counts, folder, written)
        else:
            _write_segments(opened, folder, written)
    except OSError as error:
        raise ConfigError(f"--out '{folder}': cannot be written: {error.strerror}") from error
    finally:
        if not written and made:
            folder.rmdir()
    tell(opened)
    return {
        "source": text,
        "out": str(folder),
        "holds": "counts" if opened.counts is not None else "tokens",
        "files_written": len(written),
        "bytes_written": sum(path.stat().st_size for path in written),
        **opened.notes.to_dict(),
    }


def _empty_folder(out: str) -> Path:
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out '{folder}': exists and is not an empty folder; give a new one")
    if not folder.parent.is_dir():
        raise ConfigError(f"--out '{folder}': the folder '{folder.parent}' does not exist")
    return folder


def _write_counts(counts: Counts, folder: Path, written: list[Path]) -> None:
    layers = counts.layers
    arrays: dict[str, Any] = {COUNTS_KEY: counts.load}
    if layers is not None:
        arrays |= {"moe_layers": np.array(layers.moe), "hidden_layers": np.int64(layers.num_hidden)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path = folder / f"{COUNTS_KEY}.npz"
    write_whole(path, buffer.getvalue())
    written.append(path)


def _write_segments(opened: Opened, folder: Path, written: list[Path]) -> None:
    """Chunks are joined to segments of 16 MB. A source that is wrong in the middle leaves nothing behind."""
    waiting: list[RoutingTrace] = []
    try:
        for chunk in opened.chunks():
            waiting.append(chunk)
            if sum(one.experts.nbytes for one in waiting) >= SEGMENT_BYTES:
                _flush(waiting, folder, written)
        _flush(waiting, folder, written)
        _settle(written, opened.notes)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        written.clear()
        raise


def _flush(waiting: list[RoutingTrace], folder: Path, written: list[Path]) -> None:
    if not waiting:
        return
    largest = waiting[-1].num_experts
    joined = concatenate([replace(one, num_experts=largest) for one in waiting], source="the source")
    path = folder / f"part-{len(written):08d}.safetensors"
    written.append(path)
    write_segment(joined, path)
    waiting.clear()


def _settle(written: list[Path], notes: Notes) -> None:
    """What was only known at the end goes into the segments before: E where the source lacks it, homes of no rank."""
    homeless = notes.lone_rank and notes.highest_rank >= 0
    for path in written:
        segment = read_segment(path)
        if segment.num_experts == notes.num_experts and not homeless:
            break
        settled = replace(segment, num_experts=notes.num_experts)
        write_segment(without_homes(settled) if homeless else settled, path)
