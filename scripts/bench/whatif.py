"""How long what-if takes: a screening, and a simulation of 10,000 GPUs, on a synthetic trace of DeepSeek-V3's shape.

    python scripts/bench/whatif.py [--out docs/measured/whatif.json]

Also runs the screening on the development traces. Prints seconds of wall and of processor time, and the answers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from speed import synthetic_trace

from placement.comparing import Serving
from placement.costs import ModelSizes
from placement.modelsizes import choose_sizes
from placement.scaleout import sample_layers, scale_out
from placement.screening import screen
from placement.sweep import Grid, sweep
from placement.topology import load_topology
from placement.trace import RoutingTrace, load_trace

LAYERS_SEEN = 8


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, processor = time.perf_counter(), time.process_time()
    found = work()
    return found, {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}


def screening(name: str, trace: RoutingTrace, text: str) -> dict[str, Any]:
    serving = Serving(sizes=choose_sizes(None, trace).sizes)
    found, took = timed(lambda: screen(trace, load_topology(text), serving))
    return {"what": f"screen {name} on {text}", "answer": found.answer, "reasons": list(found.reasons)} | took


def ten_thousand(trace: RoutingTrace) -> dict[str, Any]:
    sampled, _ = sample_layers(trace, LAYERS_SEEN)
    scale = scale_out(load_topology("1250x8"), trace.num_experts)
    grid = Grid(times=(1.0, 1.5), nics=(3.0, 45.0), effort=0.1)
    factor = trace.num_layers / sampled.num_layers
    points, took = timed(
        lambda: [
            point.to_dict() for part in sweep(sampled, scale, grid, ModelSizes(), layer_factor=factor) for point in part
        ]
    )
    return {
        "what": f"simulate 10,000 GPUs as {scale.num_groups} groups of {scale.group.num_ranks}, "
        f"{LAYERS_SEEN} of {trace.num_layers} layers, {len(points)} points",
        "points": points,
    } | took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "traces")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(width=120)
    large = synthetic_trace(20_000, 58, 256, 8)
    rows = []
    for name, text in (("gpt-oss-20b", "4x2"), ("mixed-64e-12l", "4x4")):
        rows.append(screening(name, load_trace(options.traces / f"{name}.npz"), text))
    rows.append(screening("synthetic 58 x 256", large, "4x8"))
    rows.append(ten_thousand(large))
    for row in rows:
        console.print(f"{row['what']}: {row['wall_s']:.1f} s ({row['processor_s']:.1f} s of processor)", markup=False)
        for line in [row.get("answer", ""), *row.get("reasons", [])]:
            console.print(f"    {line}", markup=False)
    if options.out:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        date = datetime.now(UTC).isoformat(timespec="seconds")
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        results = {"date": date, "machine": machine, "commit": found.stdout.strip(), "rows": rows}
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
