"""Import speed and memory: expert choices a second from every bulk format, and the peak at two sizes.

    python scripts/bench/interchange.py [--choices 40] [--folder /tmp/bench-interchange] [--out interchange.json]

Makes files of 48 layers, 128 experts, top 8. Each import is a process of its own: wall seconds of the import itself
(started, compiled and imported before), processor seconds, and the process's peak memory, once for the size given and
once for a quarter of it. The baseline is the plain way to read the same file whole: numpy.load, json.loads.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LAYERS, EXPERTS, TOP_K, REQUEST = 48, 128, 8, 500
FEW = 2000
AIMS = {"npz": 20.0, "segments": 20.0, "router trace": 2.0, "vllm responses": 2.0}
NAMES = ("npz", "segments", "router trace", "vllm responses", "sglang per_token")


def make(folder: Path, num_tokens: int) -> dict[str, Path]:
    """One file or folder a format, each with the same number of tokens."""
    from placement.interchange.pieces import Hints

    folder.mkdir(parents=True)
    few = np.random.default_rng(0).random((FEW, LAYERS, EXPERTS)).argpartition(TOP_K, axis=2)[:, :, :TOP_K]
    few = few.astype(np.uint8)
    chosen = np.resize(few, (num_tokens, LAYERS, TOP_K))
    order = np.arange(num_tokens)
    np.savez(folder / "t.npz", experts=chosen, request=order // REQUEST, position=order % REQUEST, num_experts=EXPERTS)
    from cluster.importing import import_source

    import_source(str(folder / "t.npz"), str(folder / "segments"), Hints())
    with (folder / "router_trace_rank0.jsonl").open("w") as file:
        tables = [json.dumps(few[:, layer].tolist()) for layer in range(LAYERS)]
        for step in range(num_tokens // FEW):
            for layer, rows in enumerate(tables):
                record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
                head = json.dumps(record | {"num_tokens": FEW, "topk": TOP_K})[:-1]
                file.write(f'{head}, "top_indices": {rows}}}\n')
    with (folder / "responses.jsonl").open("w") as file:
        for start in range(0, num_tokens, REQUEST):
            buffer = io.BytesIO()
            np.save(buffer, chosen[start : start + REQUEST])
            choice = {"index": 0, "routed_experts": base64.b64encode(buffer.getvalue()).decode()}
            usage = {"prompt_tokens": REQUEST // 2, "completion_tokens": REQUEST // 2}
            file.write(json.dumps({"choices": [choice], "usage": usage}) + "\n")
    _dump(folder / "dump.pt", chosen)
    names = ("t.npz", "segments", "router_trace_rank0.jsonl", "responses.jsonl", "dump.pt")
    return dict(zip(NAMES, (folder / name for name in names), strict=True))


def _dump(path: Path, chosen: Any) -> None:
    import torch

    records = [
        {
            "forward_pass_id": number,
            "rank": 0,
            "gatherer_key": "primary",
            "global_physical_count": torch.zeros((LAYERS, EXPERTS), dtype=torch.int32),
            "input_ids": list(range(len(chosen[start : start + REQUEST]))),
            "positions": list(range(len(chosen[start : start + REQUEST]))),
            "extend_seq_lens": [len(chosen[start : start + REQUEST])],
            "forward_mode": 1,
            "topk_ids_of_layer": torch.from_numpy(
                np.ascontiguousarray(chosen[start : start + REQUEST].transpose(1, 0, 2).astype(np.int32))
            ),
        }
        for number, start in enumerate(range(0, len(chosen), REQUEST))
    ]
    slots = torch.arange(EXPERTS).repeat(LAYERS, 1)
    torch.save({"records": records, "last_physical_to_logical_map": slots}, path)


def child(source: str, out: str, plain: bool) -> None:
    """In a process of its own: read once, and print what it took."""
    from cluster.importing import import_source
    from placement.interchange.pieces import Hints
    from placement.interchange.tables import parse_table

    parse_table(b"[[1,2]]")
    if source.endswith(".pt"):
        import torch  # noqa: F401 (starting torch is no part of reading)
    before = _peak_mb()
    wall, processor = time.perf_counter(), time.process_time()
    if plain:
        _read_plainly(Path(source))
    else:
        import_source(source, out, Hints(num_experts=EXPERTS))
    figures = {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - processor,
        "start_mb": before,
        "peak_mb": _peak_mb(),
    }
    sys.stdout.write(json.dumps(figures))


def _peak_mb() -> float:
    """This process's own peak; getrusage would pass its parent's on."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return float(line.split()[1]) / 1e3


def _read_plainly(path: Path) -> None:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            assert archive["experts"].size
    elif path.suffix == ".jsonl":
        with path.open() as file:
            kept = [json.loads(line) for line in file]
        assert all(np.array(one["top_indices"], np.uint8).size for one in kept)


def measure(source: Path, scratch: Path, *, plain: bool = False) -> dict[str, float]:
    shutil.rmtree(scratch, ignore_errors=True)
    command = [sys.executable, __file__, "--child", str(source), "--scratch", str(scratch), *(["--plain"] * plain)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    shutil.rmtree(scratch, ignore_errors=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def run(folder: Path, millions: float) -> list[dict[str, Any]]:
    shutil.rmtree(folder, ignore_errors=True)
    sizes = [int(millions * 1e6 * share / (LAYERS * TOP_K)) // FEW * FEW for share in (0.25, 1.0)]
    files = [make(folder / f"{size}", size) for size in sizes]
    rows = []
    for name in NAMES:
        small, large = (measure(made[name], folder / "out") for made in files)
        choices = sizes[1] * LAYERS * TOP_K / 1e6
        row = {
            "format": name,
            "choices_m": choices,
            "file_mb": sum(p.stat().st_size for p in [files[1][name], *files[1][name].glob("*")] if p.is_file()) / 1e6,
            "m_per_s": choices / large["wall_s"],
            "m_per_cpu_s": choices / large["cpu_s"],
            "aim": AIMS.get(name),
            "peak_mb_quarter": small["peak_mb"] - small["start_mb"],
            "peak_mb": large["peak_mb"] - large["start_mb"],
        }
        if name in ("npz", "router trace"):
            plain = measure(files[1][name], folder / "out", plain=True)
            row |= {"plain_m_per_s": choices / plain["wall_s"], "plain_peak_mb": plain["peak_mb"] - plain["start_mb"]}
        rows.append(row)
    shutil.rmtree(folder, ignore_errors=True)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="import, million expert choices", title_justify="left")
    heads = ("", "file MB", "M/s", "M/cpu s", "aim", "peak MB, 1/4 size", "peak MB", "plain M/s", "plain peak MB")
    for head in heads:
        made.add_column(head, justify="right" if head else "left")
    keys = ("file_mb", "m_per_s", "m_per_cpu_s", "aim", "peak_mb_quarter", "peak_mb", "plain_m_per_s", "plain_peak_mb")
    for row in rows:
        made.add_row(row["format"], *("" if row.get(key) is None else f"{row[key]:,.1f}" for key in keys))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", type=float, default=96.0, help="millions of expert choices a file")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-interchange"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.scratch, given.plain)
        return
    rows = run(given.folder, given.choices)
    Console().print(table(rows))
    if given.out is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "commit": commit.stdout.strip(),
        }
        given.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
