"""The report for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.report.activation import Activation
from placement.report.affinity import PairMap
from placement.report.memory import TIERS
from placement.report.noun import Report
from placement.report.promises import PastEpoch
from placement.report.traffic import Traffic
from placement.report.verdict import judge
from placement.report.words import evidence

REPORT_FORMAT = "moetis-report/2"


def report_to_json(report: Report) -> str:
    """Every number of the page, unrounded, and its sentences. A live figure that is not finite is null."""
    placement, verdict = report.plan.placement, judge(report.measured, report.part)
    part, curve = report.part, report.cache
    return json.dumps(
        {
            "format": REPORT_FORMAT,
            "title": report.title,
            "verdict": {"decision": verdict.decision.value, "text": verdict.text},
            "part": None if part is None else asdict(part),
            "evidence": evidence(report),
            "model": report.model,
            "counted": report.counted,
            "num_layers": placement.num_layers,
            "num_experts": placement.num_experts,
            "num_ranks": placement.num_ranks,
            "rows_per_rank": placement.rows_per_rank,
            "epoch": placement.epoch,
            "before_epoch": report.before_epoch,
            "top_k": report.top_k,
            "num_tokens": report.num_tokens,
            "sampled_tokens": report.sampled_tokens,
            "num_requests": report.num_requests,
            "sampling_rate": report.sampling_rate,
            "homes_recorded": report.homes_recorded,
            "workloads": list(report.workloads),
            "sizes": asdict(report.sizes),
            "measured": asdict(report.measured),
            "topology": report.topology.to_dict(),
            "traffic": {
                "before": None if report.traffic_before is None else _traffic(report.traffic_before, report),
                "after": _traffic(report.traffic_after, report),
            },
            "memory": {
                "slots_by_tier": {tier.name.lower(): report.memory.slots[:, tier].tolist() for tier in TIERS},
                "empty_slots": report.memory.empty.tolist(),
            },
            "expert_load": report.load.tolist(),
            "holders": report.holders,
            "activation": None if report.activation is None else _activation(report.activation),
            "coactivation": [_pairs(one) for one in report.coactivation],
            "transitions": [_pairs(one) for one in report.transitions],
            "rounds": [asdict(step) for step in report.rounds],
            "cache": None
            if curve is None
            else asdict(curve)
            | {"slots": curve.slots.tolist(), "lru": curve.lru.tolist(), "belady": curve.belady.tolist()},
            "past": [_past(epoch) for epoch in report.past],
            "live": [
                asdict(figure) | {"before": _finite(figure.before), "after": _finite(figure.after)}
                for figure in report.live
            ],
        },
        allow_nan=False,
    )


def _traffic(traffic: Traffic, report: Report) -> dict[str, Any]:
    """Visits and vectors are per token and layer; arrivals by group of the level. Bytes are per token, out and back."""
    token_bytes = report.sizes.token_bytes
    return {
        "rank_load_over_mean": traffic.load.tolist(),
        "judged_nodes_visited_by_layer": traffic.nodes_by_layer.tolist(),
        "levels": [
            {
                "name": name,
                "others_visited": traffic.visited(level),
                "vectors": float(traffic.vectors[level]),
                "bytes_per_token": None if token_bytes is None else traffic.bytes_per_token(level, token_bytes),
                "arrivals": traffic.arrivals[level].tolist(),
            }
            for level, name in enumerate(report.topology.levels)
            if traffic.arrivals
        ],
    }


def _activation(found: Activation) -> dict[str, Any]:
    return {
        "kinds": [{"name": name, "tokens": tokens} for name, tokens in zip(found.kinds, found.tokens, strict=True)],
        "kinds_left_out": found.left_out,
        "layers": list(found.layers),
        "position_edges": found.edges.tolist(),
        "share_of_tokens": _nulls(found.share),
    }


def _nulls(values: NDArray[np.float32]) -> Any:
    """Nested lists, with null for NaN."""
    cells: NDArray[Any] = values.astype(object)
    cells[np.isnan(values)] = None
    return cells.tolist()


def _pairs(one: PairMap) -> dict[str, Any]:
    return {
        "layer": one.layer,
        "next_layer": one.other,
        "experts": one.rows.tolist(),
        "next_experts": one.columns.tolist(),
        "share_of_tokens": one.share.tolist(),
    }


def _past(epoch: PastEpoch) -> dict[str, Any]:
    return asdict(epoch) | {"kept": epoch.kept}


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
