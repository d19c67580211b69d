"""Modelled steps against measured ones: the demo's workers serve, some steps calibrate the model, others judge it.

    python scripts/bench/step_model.py [--out docs/measured/step-model.json] [--topologies 2x1,2x2] [--tokens 24]

The workers are the demo cluster's, a process a rank, without Ray above them. Every step's tokens, homes and placement
are known from the recorder, so the model counts just what was served.
Measured is the time in the MoE layers of the rank that waited least. Calibrated on the linear and the random placement
with small and large batches; judged on EPLB's and Moetis's, and on medium batches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.demo import load_prompts
from cluster.demo_run import DEMO_PROMPTS, ROOT
from placement.baselines import eplb_placement, linear_placement, random_placement
from placement.batches import recorded_steps
from placement.calibrate import fit_costs, predict
from placement.core import Placement
from placement.costs import ModelSizes
from placement.graph import count_load
from placement.plan import plan_placement
from placement.stepcounts import StepCounts, count_steps
from placement.topology import Topology, load_topology
from placement.trace import RoutingTrace, load_trace
from workers.options import RecorderOptions, WorkerOptions
from workers.requests import GenerationRequest
from workers.worker import ExpertWorker

HIDDEN, INTERMEDIATE, TOP_K = 128, 64, 4
SIZES = ModelSizes(
    token_bytes=HIDDEN * 4 + TOP_K * 8,
    combine_bytes=HIDDEN * 8,
    expert_bytes=3 * HIDDEN * INTERMEDIATE * 4,
    pair_flops=6 * HIDDEN * INTERMEDIATE,
)
WAVES = {"small": 4, "medium": 16, "large": 64}
TURNS = {"small": 3, "medium": 2, "large": 2}
SPARE, CACHE_SHARE, TIMEOUT_S = 1.25, 0.4, 300
DEMO_MODEL = ROOT / "configs" / "models" / "demo"


def live(rank: int, barrier: Any, meeting: Any, answers: Any, job: dict[str, Any]) -> None:
    """One rank's process: serve the waves on each of the job's placements in turn."""
    found = {}
    for name, placement in job["placements"].items():
        options = WorkerOptions(
            model=DEMO_MODEL, recorder=RecorderOptions(folder=job["folder"] / name / "trace"), cache_share=CACHE_SHARE
        )
        worker = ExpertWorker(options, rank=rank, topology=job["topology"], placement=placement)
        if rank == 0:
            rendezvous = worker.open_rendezvous(host="127.0.0.1", interface="lo")
            for _ in range(barrier.parties - 1):
                meeting.put(rendezvous)
        else:
            rendezvous = meeting.get(timeout=TIMEOUT_S)
        worker.join(rendezvous)
        found[name] = serve_waves(worker, rank, barrier, job["prompts"], job["tokens"])
        worker.stop()
    answers.put((rank, found))


def serve_waves(worker: ExpertWorker, rank: int, barrier: Any, prompts: Any, tokens: int) -> dict[str, Any]:
    """All waves; requests go to ranks in turn. Seconds of this rank's steps, where each wave ended, cache counters."""
    ends: list[tuple[int, str]] = []
    number = 0
    for wave, size in WAVES.items():
        for _ in range(TURNS[wave]):
            barrier.wait(timeout=TIMEOUT_S)
            mine = [index for index in range(number, number + size) if index % barrier.parties == rank]
            for index in mine:
                prompt = prompts[index % len(prompts)]
                worker.submit(GenerationRequest(request=str(index), prompt=prompt, max_new_tokens=tokens))
            left = len(mine)
            while left:
                left -= sum(event.end is not None for event in worker.next_events(1.0))
            number += size
            barrier.wait(timeout=TIMEOUT_S)
            ends.append((worker.status().steps, wave))
    return {"seconds": worker.recent_steps(), "ends": ends, "cache": worker.status().cache}


def serve(
    folder: Path, topology: Topology, placements: dict[str, Placement], prompts: Any, tokens: int
) -> dict[str, Any]:
    """Serve the waves on each placement, a process a rank: by placement the trace, step times, wave ends, cache
    hits."""
    context = multiprocessing.get_context("spawn")
    barrier, meeting, answers = context.Barrier(topology.num_ranks), context.Queue(), context.Queue()
    job = {"placements": placements, "topology": topology, "folder": folder, "prompts": prompts, "tokens": tokens}
    processes = [
        context.Process(target=live, args=(rank, barrier, meeting, answers, job), daemon=True)
        for rank in range(topology.num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        by_rank = dict(answers.get(timeout=TIMEOUT_S) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    return {
        name: {
            "trace": load_trace(folder / name / "trace"),
            "seconds": [by_rank[rank][name]["seconds"] for rank in sorted(by_rank)],
            "ends": by_rank[0][name]["ends"],
            "hits": sum(found[name]["cache"]["hits"] for found in by_rank.values()),
            "lookups": sum(found[name]["cache"]["lookups"] for found in by_rank.values()),
        }
        for name in placements
    }


def measured_seconds(served: dict[str, Any], numbers: Any) -> Any:
    """[S]: seconds in the MoE layers of the rank that waited least, for each numbered step."""
    by_rank = []
    for steps in served["seconds"]:
        took = {step.step: step.dispatch_s + step.compute_s + step.combine_s for step in steps}
        by_rank.append([took[number] for number in numbers.tolist()])
    return np.min(by_rank, axis=0)


def count(placement: Placement, topology: Topology, served: dict[str, Any]) -> tuple[Any, StepCounts]:
    trace: RoutingTrace = served["trace"]
    numbers, steps = recorded_steps(trace.step)
    slots = max(1, int(np.ceil(CACHE_SHARE * placement.rows_per_rank)))
    return numbers, count_steps(placement, topology, trace, trace.source_rank, steps, gpu_slots=slots, warm_up=False)


def part_of(counts: StepCounts, chosen: Any) -> StepCounts:
    return StepCounts(**{name: getattr(counts, name)[chosen] for name in StepCounts.__slots__})


def check(folder: Path, text: str, prompts: Any, tokens: int, note: Any) -> dict[str, Any]:
    """Serve on four placements, calibrate on two, predict all."""
    topology = load_topology(text)
    rows = int(32 * SPARE / topology.num_ranks)
    shape = (8, 32, topology.num_ranks, rows)
    own = folder / text
    first = {"linear": linear_placement(*shape), "random": random_placement(*shape)}
    note(f"{text}: serving on {', '.join(first)}")
    served = serve(own, topology, first, prompts, tokens)
    fit = served["linear"]["trace"]
    then = {
        "eplb": eplb_placement(count_load(fit)[0], topology.num_ranks, rows),
        "moetis": plan_placement(fit, topology, rows_per_rank=rows, effort=0.2),
    }
    note(f"{text}: serving on {', '.join(then)}")
    served |= serve(own, topology, then, prompts, tokens)
    placements = first | then
    counted = {name: count(placements[name], topology, served[name]) for name in placements}
    seconds = {name: measured_seconds(served[name], counted[name][0]) for name in placements}
    waves = {name: wave_of(served[name], counted[name][0]) for name in placements}
    train = [(name, np.isin(waves[name], ("small", "large"))) for name in ("linear", "random")]
    fitted = fit_costs(
        [part_of(counted[name][1], chosen) for name, chosen in train],
        np.concatenate([seconds[name][chosen] for name, chosen in train]),
    )
    cases = []
    for name in placements:
        modelled = predict(fitted, counted[name][1], topology, SIZES)
        for wave in WAVES:
            own = waves[name] == wave
            measured, model = float(np.median(seconds[name][own])), float(np.median(modelled[own]))
            cases.append(
                {
                    "placement": name,
                    "wave": wave,
                    "steps": int(own.sum()),
                    "tokens_per_step": float(counted[name][1].tokens[own].mean()),
                    "measured_ms": 1e3 * measured,
                    "modelled_ms": 1e3 * model,
                    "error": model / measured - 1,
                    "calibrated_on": wave != "medium" and name in ("linear", "random"),
                }
            )
    hits = {
        name: {
            "counted": counted[name][1].hit_rate,
            "measured": served[name]["hits"] / served[name]["lookups"],
        }
        for name in placements
    }
    return {
        "topology": text,
        "fitted": asdict(fitted),
        "cases": cases,
        "hit_rates": hits,
        "ratios": ratios(cases),
    } | errors(cases)


def wave_of(served: dict[str, Any], numbers: Any) -> Any:
    ends = np.array([end for end, _ in served["ends"]])
    names = np.array([name for _, name in served["ends"]])
    return names[np.minimum(np.searchsorted(ends, numbers, side="right"), len(names) - 1)]


def ratios(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each placement's step over the linear one's of the same wave, measured and modelled."""
    base = {case["wave"]: case for case in cases if case["placement"] == "linear"}
    return [
        {
            "placement": case["placement"],
            "wave": case["wave"],
            "measured": case["measured_ms"] / base[case["wave"]]["measured_ms"],
            "modelled": case["modelled_ms"] / base[case["wave"]]["modelled_ms"],
        }
        for case in cases
        if case["placement"] != "linear"
    ]


def errors(cases: list[dict[str, Any]]) -> dict[str, float]:
    apart = {flag: [abs(case["error"]) for case in cases if case["calibrated_on"] == flag] for flag in (True, False)}
    return {
        "median_error_calibrated": float(np.median(apart[True])),
        "median_error_predicted": float(np.median(apart[False])),
        "largest_error_predicted": float(np.max(apart[False])),
    }


def show(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{found['topology']}: MoE time of a step, ms (medians)")
    for name in ("placement", "wave", "steps", "tokens", "measured", "modelled", "error", "used to calibrate"):
        table.add_column(name)
    for case in found["cases"]:
        table.add_row(
            case["placement"],
            case["wave"],
            str(case["steps"]),
            f"{case['tokens_per_step']:.1f}",
            f"{case['measured_ms']:.2f}",
            f"{case['modelled_ms']:.2f}",
            f"{case['error']:+.1%}",
            "yes" if case["calibrated_on"] else "",
        )
    console.print(table)
    for row in found["ratios"]:
        console.print(
            f"{row['placement']} over linear, {row['wave']}: {row['measured']:.3f}, model {row['modelled']:.3f}"
        )
    for name, rate in found["hit_rates"].items():
        console.print(f"hit rate on {name}: measured {rate['measured']:.4f}, counted {rate['counted']:.4f}")
    console.print({key: value for key, value in found.items() if "error" in key})
    console.print(found["fitted"])


def head_commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--topologies", default="2x1,2x2")
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    console, progress = Console(width=120), Console(stderr=True)
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": head_commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "checked": [],
    }
    prompts = [prompt.tokens for prompt in load_prompts(DEMO_PROMPTS, DEMO_MODEL, 100)]
    with tempfile.TemporaryDirectory(prefix="moetis-steps-") as folder:
        for text in options.topologies.split(","):
            found = check(Path(folder), text, prompts, options.tokens, progress.print)
            results["checked"].append(found)
            show(found, console)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
