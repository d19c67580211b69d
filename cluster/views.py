"""Tables for people and dictionaries for machines."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from cluster.offline import Comparison
from cluster.service import RebalanceResult
from placement.planfile import Plan

ROWS = (
    ("nodes_visited", "other nodes visited per token and layer"),
    ("ranks_visited", "other ranks visited per token and layer"),
    ("load_max_over_mean", "load max/mean over ranks"),
    ("node_load_max_over_mean", "load max/mean over nodes"),
    ("step_load_max_over_mean", "load max/mean over ranks, per step of 256 tokens"),
)


def score_table(title: str, columns: dict[str, dict[str, Any]]) -> Table:
    """One row a figure, one column a placement."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure, label in ROWS:
        table.add_row(label, *(f"{score[figure]:.3f}" for score in columns.values()))
    return table


def plan_table(plan: Plan) -> Table:
    measured = plan.measured
    fit, held_out = measured["fit"], measured["held_out"]
    title = (
        f"fitted on {fit['tokens']} tokens of {fit['requests']} requests, "
        f"judged on {held_out['tokens']} tokens of {held_out['requests']} others"
    )
    names = {"before": "before", "eplb": "EPLB", "after": "plan", "after_routed_homes": "plan, routed homes"}
    return score_table(title, {label: measured[key] for key, label in names.items()})


def comparison_table(found: Comparison) -> Table:
    columns = {"plan": found.plan.to_dict()} | {name: score.to_dict() for name, score in found.baselines.items()}
    return score_table(f"judged on {found.judged_on}, homes: {found.homes}", columns)


def rebalance_to_dict(result: RebalanceResult) -> dict[str, Any]:
    migration = result.migration
    return {
        "decision": result.decision,
        "reason": result.reason,
        "epoch_before": result.before.placement.epoch,
        "epoch": result.plan.placement.epoch if result.decision == "applied" else result.before.placement.epoch,
        "moves": 0 if migration is None else migration.num_moves,
        "rounds": 0 if migration is None else len(migration.rounds),
        "bytes": 0 if migration is None else migration.num_bytes,
        "plan_s": result.plan_s,
        "copy_s": result.copy_s,
        "switch_s": result.switch_s,
        "measured": result.plan.measured,
    }


def rebalance_table(result: RebalanceResult) -> Table:
    figures = rebalance_to_dict(result)
    table = plan_table(result.plan)
    table.caption = (
        f"{result.decision}: {result.reason}\nepoch {figures['epoch']}, {figures['moves']} experts moved in "
        f"{figures['rounds']} rounds, {figures['bytes'] / 1e6:.1f} MB; planned in {result.plan_s:.1f} s, "
        f"copied in {result.copy_s:.2f} s, switched in {result.switch_s:.2f} s"
    )
    table.caption_justify = "left"
    return table
