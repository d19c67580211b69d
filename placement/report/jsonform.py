"""The report for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from typing import Any

from placement.report.noun import Report
from placement.report.traffic import Traffic
from placement.report.verdict import judge
from placement.report.words import evidence

REPORT_FORMAT = "moetis-report/1"


def report_to_json(report: Report) -> str:
    """Every number of the page, unrounded, and its sentences. A live figure that is not finite is null."""
    placement, verdict = report.plan.placement, judge(report.measured)
    return json.dumps(
        {
            "format": REPORT_FORMAT,
            "title": report.title,
            "verdict": {"decision": verdict.decision.value, "text": verdict.text},
            "evidence": evidence(report),
            "model": report.model,
            "num_layers": placement.num_layers,
            "num_experts": placement.num_experts,
            "num_ranks": placement.num_ranks,
            "rows_per_rank": placement.rows_per_rank,
            "epoch": placement.epoch,
            "before_epoch": report.before_epoch,
            "top_k": report.top_k,
            "num_tokens": report.num_tokens,
            "num_requests": report.num_requests,
            "sampling_rate": report.sampling_rate,
            "homes_recorded": report.homes_recorded,
            "workloads": list(report.workloads),
            "measured": asdict(report.measured),
            "topology": report.topology.to_dict(),
            "traffic": {
                "before": None if report.traffic_before is None else _traffic(report.traffic_before, report),
                "after": _traffic(report.traffic_after, report),
            },
            "expert_load": report.load.tolist(),
            "holders": report.holders,
            "coactivation": [
                {"layer": layer, "experts": order.tolist(), "share_of_tokens": share.tolist()}
                for layer, order, share in report.coactivation
            ],
            "rounds": [asdict(step) for step in report.rounds],
            "live": [
                asdict(figure) | {"before": _finite(figure.before), "after": _finite(figure.after)}
                for figure in report.live
            ],
        },
        allow_nan=False,
    )


def _traffic(traffic: Traffic, report: Report) -> dict[str, Any]:
    """Visits are per token and layer; arrivals by group of the level."""
    return {
        "rank_load_over_mean": traffic.load.tolist(),
        "levels": [
            {"name": name, "others_visited": traffic.visited(level), "arrivals": traffic.arrivals[level].tolist()}
            for level, name in enumerate(report.topology.levels)
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
