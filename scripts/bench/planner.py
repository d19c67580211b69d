"""The planner's tables: hops and balance against every baseline, modelled steps, other domains, churn, speed.

    python scripts/bench/planner.py [--traces ../shared/traces] [--out planner.json] [--only hops,domains,...]
                                    [--growth-plot docs/measured/growth.svg]

Fits on even requests, judges on odd ones. Every baseline runs in the same process; date and machine go into the JSON.
Lower bounds are in bounds.py beside this file, timings in speed.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bounds import hops_bound
from speed import growth, growth_svg, speed

from placement.baselines import balance_placement, eplb_placement, linear_placement, random_placement
from placement.core import Placement
from placement.costs import ModelSizes, step_time
from placement.counts import Counts, plan_counts
from placement.evaluate import evaluate, max_over_mean
from placement.graph import count_load
from placement.homes import homes_of, homes_per_token, route_homes
from placement.plan import plan_placement
from placement.relevel import relevel
from placement.replan import num_copies_between
from placement.shares import load_per_rank
from placement.topology import Link, Topology, load_topology
from placement.trace import RoutingTrace, load_trace

MODELS = {
    "gpt-oss-20b": ("4x2", ModelSizes(token_bytes=5_760, expert_bytes=13.2e6, pair_flops=49.8e6)),
    "mixed-64e-12l": ("4x4", ModelSizes(token_bytes=4_096, expert_bytes=9.4e6, pair_flops=18.9e6)),
}
SLOTS = (1.0, 1.25, 1.5, 2.0)
SLOW_NIC = Link(bandwidth=3e9, latency_s=30e-6)
Row = dict[str, Any]


def on_slow_network(topology: Topology) -> Topology:
    """The same tree with 25 GbE between nodes."""
    links = tuple(SLOW_NIC if index <= topology.node_level else link for index, link in enumerate(topology.links))
    return replace(topology, name=f"{topology.name} 25GbE", links=links)


def routed_homes(placement: Placement, topology: Topology, trace: RoutingTrace) -> Any:
    requests, ranks = route_homes(placement, topology, trace, 64)
    return homes_per_token(trace.request, requests, ranks)


def contenders(fit: RoutingTrace, topology: Topology, rows: int) -> dict[str, Placement]:
    shape = (fit.num_layers, fit.num_experts, topology.num_ranks, rows)
    return {
        "linear": linear_placement(*shape),
        "random": random_placement(*shape),
        "eplb": eplb_placement(count_load(fit)[0], topology.num_ranks, rows),
        "metis, no search": plan_placement(fit, topology, rows_per_rank=rows, effort=0.0),
        "balance only": plan_placement(fit, topology, rows_per_rank=rows, balance_only=True),
    }


def hops_and_steps(traces: Path, name: str) -> list[Row]:
    """Hops, balance and modelled step times of all contenders at every number of slots."""
    spec, sizes = MODELS[name]
    topology = load_topology(spec)
    fit, held_out = load_trace(traces / f"{name}.npz").split_by_request()
    homes = homes_of(held_out, topology.num_ranks)
    rows_out: list[Row] = []
    for factor in SLOTS:
        rows = int(fit.num_experts * factor / topology.num_ranks)
        everyone = contenders(fit, topology, rows)
        begun = time.perf_counter()
        everyone["moetis"] = plan_placement(fit, topology, rows_per_rank=rows)
        plan_s = time.perf_counter() - begun
        cases = [(label, placement, homes) for label, placement in everyone.items()]
        cases.append(("moetis, routed homes", everyone["moetis"], routed_homes(everyone["moetis"], topology, held_out)))
        for label, placement, where in cases:
            row = {"trace": name, "slots": factor, "planner": label}
            row |= evaluate(placement, topology, held_out, where).to_dict()
            for network, cluster in (("fast", topology), ("25GbE", on_slow_network(topology))):
                for batch in (512, 8192):
                    row[f"step_{network}_{batch}_s"] = step_time(
                        placement, cluster, held_out, where, sizes, batch
                    ).mean_s
            row["plan_s"] = plan_s if label.startswith("moetis") else None
            rows_out.append(row)
        bound = hops_bound(held_out, topology, rows)
        rows_out.append({"trace": name, "slots": factor, "planner": "lower bound", "nodes_visited": bound})
        eplb = next(row for row in rows_out if row["slots"] == factor and row["planner"] == "eplb")
        for row in rows_out:
            if row["slots"] == factor:
                row["over_eplb"] = row["nodes_visited"] / eplb["nodes_visited"]
                for key in [key for key in row if key.startswith(("step_fast", "step_25GbE"))]:
                    row[key.replace("_s", "_over_eplb")] = row[key] / eplb[key]
    return rows_out


def other_domains(traces: Path, name: str) -> list[Row]:
    """Fitted on every second workload, judged on the others, against a plan fitted on those others' even requests."""
    topology = load_topology(MODELS[name][0])
    trace = load_trace(traces / f"{name}.npz")
    assert trace.workload is not None
    rows = int(trace.num_experts * 1.5 / topology.num_ranks)
    abroad = trace.select(trace.workload % 2 == 0)
    at_home, judged = trace.select(trace.workload % 2 == 1).split_by_request()
    homes = homes_of(judged, topology.num_ranks)
    placements = {
        "moetis, in domain": plan_placement(at_home, topology, rows_per_rank=rows),
        "moetis, other domains": plan_placement(abroad, topology, rows_per_rank=rows),
        "eplb, other domains": eplb_placement(count_load(abroad)[0], topology.num_ranks, rows),
    }
    return [
        {"trace": name, "planner": label} | evaluate(placement, topology, judged, homes).to_dict()
        for label, placement in placements.items()
    ]


def load_balance(placement: Placement, load: Any) -> float:
    return max_over_mean(load_per_rank(placement, load))


def churn(traces: Path) -> list[Row]:
    """DeepSeek-V3 counts, 58 x 256 -> 288 on 32 ranks: the load perturbed, few copies allowed."""
    load = np.load(traces / "deepseek-v3-counts.npz")["decode_in1000out1000"][3:]
    rng = np.random.default_rng(0)
    current, old_eplb = balance_placement(load, 32, 9), eplb_placement(load, 32, 9)
    slots = current.physical_to_logical.size
    rows_out = []
    for noise, budget in ((0.05, 0.05), (0.2, 0.15)):
        changed = np.maximum(load * (1 + noise * rng.normal(size=load.shape)), 0)
        begun = time.perf_counter()
        kept = relevel(current, changed, most_copies=int(budget * slots))
        seconds = time.perf_counter() - begun
        fresh, new_eplb = balance_placement(changed, 32, 9), eplb_placement(changed, 32, 9)
        rows_out.append(
            {
                "noise": noise,
                "copied": num_copies_between(current, kept) / slots,
                "balance": load_balance(kept, changed),
                "balance_from_scratch": load_balance(fresh, changed),
                "eplb_copied": num_copies_between(old_eplb, new_eplb) / slots,
                "eplb_balance": load_balance(new_eplb, changed),
                "seconds": seconds,
            }
        )
    return rows_out


def counts_alone(traces: Path) -> list[Row]:
    """Plans from counts of one workload, as `moetis plan` makes them, judged on each."""
    archive = np.load(traces / "deepseek-v3-counts.npz")
    fitted = Counts(load=archive["decode_in1000out1000"][3:].astype(np.float64), source="decode_in1000out1000")
    planned = {
        (topology.num_ranks, rows): plan_counts(fitted, topology, rows_per_rank=rows).placement
        for topology, rows in ((load_topology("4x8"), 9), (load_topology("18x8"), 2))
    }
    return [
        {
            "ranks": ranks,
            "judged_on": workload,
            "moetis": load_balance(placement, archive[workload][3:]),
            "eplb": load_balance(eplb_placement(fitted.load, ranks, rows), archive[workload][3:]),
        }
        for (ranks, rows), placement in planned.items()
        for workload in archive.files
    ]


def show(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        values = (row.get(key, "") for key in rows[0])
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    Console(width=240).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "traces")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="hops,domains,churn,counts,speed")
    parser.add_argument("--growth-plot", type=Path, help="also time plans of many sizes, and draw them as an SVG")
    options = parser.parse_args()
    wanted = options.only.split(",")
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    for name in MODELS:
        if "hops" in wanted:
            results[f"hops {name}"] = hops_and_steps(options.traces, name)
            show(f"{name}: held-out hops, balance, modelled steps", results[f"hops {name}"])
        if "domains" in wanted:
            results[f"domains {name}"] = other_domains(options.traces, name)
            show(f"{name}: judged on workloads that were not fitted on", results[f"domains {name}"])
    for key, run in (("churn", churn), ("counts", counts_alone)):
        if key in wanted:
            results[key] = run(options.traces)
            show(key, results[key])
    if "speed" in wanted:
        results["speed"] = speed()
        show("speed", results["speed"])
    if options.growth_plot:
        results["growth"] = growth()
        show("growth, CPU seconds", results["growth"])
        caption = f"CPU seconds a plan, 8 layers, top-8; {results['date'][:10]}, {results['machine']}"
        options.growth_plot.write_text(growth_svg(results["growth"], caption))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
