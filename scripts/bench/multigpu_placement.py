"""Stage `placement`: tokens/s of the linear, EPLB and Moetis placements on the same routing ids, and the cost model.

The ids are a trace's judged requests; the plans know the others. What runs is the stack of expert layers alone. "Two
nodes" are two ranks whose exchange is held up on the host: after each collective a rank waits until the bytes that
crossed would have come over a link of the given rate, sends and receives at once, plus a latency. The time is real, the
link is not: nothing overlaps with it, and NVLink's own time is within it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from multigpu_crew import Crew, slowest
from multigpu_stack import Stack, stack_of
from speed import synthetic_trace

from placement.baselines import eplb_placement, linear_placement
from placement.batches import draw_steps, phase_tokens
from placement.calibrate import fit_costs, predict
from placement.costs import ModelSizes
from placement.graph import count_load
from placement.homes import homes_per_token, random_homes, route_homes
from placement.plan import plan_placement
from placement.pricing import part_times, step_seconds
from placement.stepcounts import StepCounts, count_steps
from placement.topology import Link, load_topology
from placement.trace import DECODE, RoutingTrace, load_trace
from workers.group import Group
from workers.peers import Peers

SPARE = 1.25
BATCHES = {64: 20, 512: 12, 4096: 6}
WARM = 3
# GB/s and microseconds; the first is the machine's own.
LINKS = {"one node": None, "two nodes, 25 GB/s": (25.0, 15.0), "two nodes, 3 GB/s": (3.0, 20.0)}


def make_cases(path: Path | None, num_ranks: int, *, tiny: bool) -> dict[str, Any]:
    """Placements, homes, steps and counts: all that takes a planner and a compiler, made once for all ranks."""
    trace = synthetic_trace(3000, 2, 8, 2) if tiny or path is None else load_trace(path)
    fit, judged = trace.split_by_request()
    rows = int(trace.num_experts * SPARE / num_ranks)
    shape = (trace.num_layers, trace.num_experts, num_ranks, rows)
    rng = np.random.default_rng(0)
    batches = {8: 4, 16: 4} if tiny else BATCHES
    steps = {
        batch: draw_steps(judged, phase_tokens(judged, DECODE), batch, batch * (n + WARM), rng)
        for batch, n in batches.items()
    }
    homes = random_homes(judged.request, num_ranks)
    runs = []
    for text in (f"1x{num_ranks}", f"{num_ranks}x1"):
        topology = load_topology(text)
        moetis = plan_placement(fit, topology, rows_per_rank=rows, effort=0.1 if tiny else 0.2)
        placements = {
            "linear": linear_placement(*shape),
            "EPLB": eplb_placement(count_load(fit)[0], num_ranks, rows),
            "Moetis": moetis,
        }
        routed = homes_per_token(judged.request, *route_homes(moetis, topology, judged, 64))
        cases = [(name, placement, homes) for name, placement in placements.items()] + [
            ("Moetis, homes", moetis, routed)
        ]
        for name, placement, home in cases:
            for batch, own in steps.items():
                counts = count_steps(placement, topology, judged, home, own)
                runs.append(
                    {
                        "topology": text,
                        "name": name,
                        "placement": placement,
                        "batch": batch,
                        "home": home,
                        "counts": counts,
                    }
                )
    return {"trace": judged, "steps": steps, "runs": runs}


def sizes(stack_shape: tuple[int, int], top_k: int, itemsize: int) -> ModelSizes:
    """stack_shape: hidden and intermediate size; rows as `workers/exchange.py` packs them, sums in float32."""
    hidden, inner = stack_shape
    return ModelSizes(
        token_bytes=hidden * itemsize + 8 * top_k,
        combine_bytes=hidden * 4,
        expert_bytes=3 * hidden * inner * itemsize,
        pair_flops=6 * hidden * inner,
    )


class SlowGroup(Group):
    """A group whose collectives take at least as long as a link of bytes_per_s between the ranks would."""

    def __init__(self, group: Group, *, rank: int, bytes_per_s: float, latency_s: float) -> None:
        self._inner, self._own_rank = group, rank
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s

    def all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int] | None, sent: list[int] | None
    ) -> None:
        _sync(incoming)
        begun = time.perf_counter()
        self._inner.all_to_all(incoming, outgoing, received, sent)
        _sync(incoming)
        crossing = max(self._crossing(incoming, received), self._crossing(outgoing, sent))
        until = begun + self._latency_s + crossing / self._bytes_per_s
        while time.perf_counter() < until:
            pass

    def check(self) -> None:
        self._inner.check()

    def _crossing(self, rows: torch.Tensor, split: list[int] | None) -> int:
        """Bytes of the rows that go to or come from other ranks; every rank is a node here."""
        if split is None or not len(rows):
            return rows.nbytes
        return rows.nbytes * (sum(split) - split[self._own_rank]) // len(rows)


def _sync(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def stage_placement(crew: Crew) -> None:
    cases = crew.job.cases or make_cases(None, crew.num_ranks, tiny=crew.job.tiny)
    trace: RoutingTrace = cases["trace"]
    groups = crew.meet()
    stack = stack_of(crew, num_layers=trace.num_layers, num_experts=trace.num_experts, top_k=trace.top_k)
    for links, rate in LINKS.items():
        data = groups.data
        if rate is not None:
            data = SlowGroup(data, rank=crew.rank, bytes_per_s=rate[0] * 1e9, latency_s=rate[1] * 1e-6)
        wanted = f"1x{crew.num_ranks}" if rate is None else f"{crew.num_ranks}x1"
        for number, run in enumerate(cases["runs"]):
            if run["topology"] == wanted:
                seconds = _run(crew, stack, groups, data, trace, cases["steps"][run["batch"]], run)
                crew.note(
                    "placement",
                    links=links,
                    name=run["name"],
                    batch=run["batch"],
                    tokens_per_s=run["batch"] * len(seconds) / sum(seconds),
                    median_ms=float(np.median(seconds)) * 1e3,
                    run=number,
                    seconds=[round(value, 7) for value in seconds],
                )
    groups.leave()


def _run(
    crew: Crew, stack: Stack, groups: Peers, data: Group, trace: RoutingTrace, steps: Any, run: dict[str, Any]
) -> list[float]:
    """Seconds of each step but the first ones, of the slowest rank."""
    stack.serve(run["placement"], load_topology(run["topology"]), data)
    found = []
    for start, end in zip(steps.bounds[:-1], steps.bounds[1:], strict=True):
        tokens = steps.index[start:end]
        home = run["home"][tokens]
        mine = tokens[home == crew.rank]
        most = int(np.bincount(home, minlength=crew.num_ranks).max())
        ids = torch.from_numpy(trace.experts[mine].transpose(1, 0, 2).astype(np.int64)).to(crew.device)
        crew.sync()
        slowest(groups.control, 0.0)
        begun = time.perf_counter()
        stack.step(ids, most)
        crew.sync()
        found.append(slowest(groups.control, time.perf_counter() - begun))
    return found[WARM:]


def judge(rows: list[dict[str, Any]], cases: dict[str, Any] | None, *, tiny: bool) -> list[dict[str, Any]]:
    """Ratios to the linear placement, and the cost model: as it comes, and calibrated on linear's smallest and largest
    batches, then judged on everything else. Prints and returns rows."""
    if cases is None:
        cases = make_cases(None, 2, tiny=tiny)
    found = []
    sized = sizes((32, 16) if tiny else (2048, 1024), cases["trace"].top_k, 4 if tiny else 2)
    for links in LINKS:
        own = [row for row in rows if row["what"] == "placement" and row["links"] == links]
        if not own:
            continue
        found += _judge_links(links, own, cases, sized)
    for row in found:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    return found


def _judge_links(
    links: str, rows: list[dict[str, Any]], cases: dict[str, Any], sized: ModelSizes
) -> list[dict[str, Any]]:
    runs = cases["runs"]
    batches = sorted(cases["steps"])
    counted = {row["run"]: _after_warm(runs[row["run"]]["counts"]) for row in rows}
    fit_on = [row for row in rows if row["name"] == "linear" and row["batch"] in (batches[0], batches[-1])]
    seconds = np.concatenate([row["seconds"] for row in fit_on])
    fitted = fit_costs([counted[row["run"]] for row in fit_on], seconds) if len(seconds) >= 10 else None
    linear = {row["batch"]: row["tokens_per_s"] for row in rows if row["name"] == "linear"}
    found, errors = [], []
    for row in rows:
        topology, rate = load_topology(runs[row["run"]]["topology"]), LINKS[links]
        if rate is not None:
            link = Link(bandwidth=rate[0] * 1e9, latency_s=rate[1] * 1e-6)
            topology = replace(topology, links=(link,) * len(topology.links))
        counts = counted[row["run"]]
        num_layers = counts.pairs.shape[1]
        plain = float(np.median(step_seconds(part_times(counts, topology, sized)))) * 1e3
        line = {
            "what": "placement, judged",
            "links": links,
            "name": row["name"],
            "batch": row["batch"],
            "over_linear": row["tokens_per_s"] / linear[row["batch"]],
            "measured_ms": row["median_ms"],
            "uncalibrated_ms": plain,
            "other_ranks_per_token": float(counts.vectors.sum(axis=(0, 1)).max() / counts.tokens.sum() / num_layers),
        }
        if fitted is not None:
            modelled = float(np.median(predict(fitted, counts, topology, sized))) * 1e3
            line |= {"calibrated_ms": modelled, "error": modelled / row["median_ms"] - 1, "fitted_on": row in fit_on}
            if row not in fit_on:
                errors.append(abs(line["error"]))
        found.append(line)
    if errors:
        found.append(
            {
                "what": "cost model",
                "links": links,
                "median_error": float(np.median(errors)),
                "largest_error": float(np.max(errors)),
                "median_error_uncalibrated": float(
                    np.median([abs(line["uncalibrated_ms"] / line["measured_ms"] - 1) for line in found])
                ),
            }
        )
    return found


def _after_warm(counts: StepCounts) -> StepCounts:
    return StepCounts(**{name: getattr(counts, name)[WARM:] for name in StepCounts.__slots__})
