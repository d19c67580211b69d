"""Our expert cache beside FreeToken's, on one GPU and in one run: lookup, making room and copies.

    python scripts/bench/beside_freetoken.py --freetoken FOLDER --trace mixed-64e-12l.npz --out beside-freetoken.json

1. The shape of FreeToken's own benchmark: one layer of Qwen3-30B-A3B, batch sizes and miss rates as there, medians
   beside the bound of what is missing over plain pinned copies. Slots hold half the experts of four layers.
2. The routing of a trace on OLMoE's shape, both caches warmed by the same steps from empty slots: hit rate, and a
   step's lookups and copies, alone and with the same fused kernels computing behind them (means).

Wall-clock, from ids on the device until all has landed and the device knows the slots; the device is idle before. Ours
fetches the ids to the host, as it always does. FreeToken's runs call by call and, as in its engine, as a CUDA graph.
Ours begins with a policy that has seen nothing, as FreeToken's LRU has; `learned` has seen other requests of the trace.
FreeToken refuses fewer slots than a layer has experts, and can't be captured where a step has more ids than the cache
has slots. Figures of bytes: how many experts do not lie bit for bit in the slots where they are said to be.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from placement.trace import RoutingTrace, load_trace
from scripts.bench.freetoken_shape import shape_bench, slots_of_shape, stage_shape
from scripts.bench.freetoken_sides import Rival, banks_of, freetoken_cache, why_not
from scripts.bench.freetoken_trace import stage_trace
from scripts.bench.offload import Bench

LEAST_SECONDS = 15.0
SHAPE = ("batch", "needed", "missing", "moetis_ms", "freetoken_ms", "freetoken_graph_ms", "bound_ms")
TRACE = ("what", "batch", "share", "policy", "hit_rate", "calls_ms", "ms", "bound_ms", "computed_ms", "wrong", "error")


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows of figures below each other, a dash for what there is none of."""

    def shown(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [list(columns)] + [[shown(row.get(column, "-")) for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--freetoken", type=Path, help="the folder that its package lies in; else Python must find it")
    parser.add_argument(
        "--seconds",
        type=float,
        default=115.0,
        help="of the whole run; cases of the trace that have no time are left out",
    )
    parser.add_argument("--commit", default="", help="for machines without git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun = time.monotonic()
    lacking = why_not(options.freetoken)
    if lacking is not None:
        print(lacking, file=sys.stderr)
        sys.exit(2)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name(),
        "commit": commit,
        "torch": torch.__version__,
        "freetoken": importlib.import_module("freetoken").__version__,
    }
    rows: list[dict[str, Any]] = []
    # Whoever's time is up keeps what was measured.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with torch.no_grad():
            measure(options.trace, begun + options.seconds - LEAST_SECONDS, rows)
    finally:
        if options.out is not None:
            options.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


def measure(path: Path, end: float, rows: list[dict[str, Any]]) -> None:
    """Both stages, into rows. end: see `stage_trace`."""
    trace = load_trace(path)
    _measure_shape(trace, rows)
    print(table([row for row in rows if row["what"] == "its shape"], SHAPE), flush=True)
    bench = Bench(trace)
    bench.rows = rows
    stage_trace(bench, banks_of(bench), end)
    print(table([row for row in rows if row["what"] in ("moetis", "freetoken")], TRACE), flush=True)


def _measure_shape(trace: RoutingTrace, rows: list[dict[str, Any]]) -> None:
    """What it needs is let go of with it."""
    bench = shape_bench(trace)
    bench.rows = rows
    stage_shape(bench, Rival(freetoken_cache(bench, banks_of(bench), slots_of_shape(bench))))


if __name__ == "__main__":
    main()
