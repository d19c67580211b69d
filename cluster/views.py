"""Tables for people and dictionaries for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from placement.planfile import Plan

if TYPE_CHECKING:
    from cluster.outcomes import RebalanceResult

ROWS = (
    ("nodes_visited", "other nodes visited per token and layer"),
    ("ranks_visited", "other ranks visited per token and layer"),
    ("load_max_over_mean", "load max/mean over ranks"),
    ("node_load_max_over_mean", "load max/mean over nodes"),
    ("step_load_max_over_mean", "load max/mean over ranks, per step of 256 tokens"),
)


def score_table(title: str, columns: dict[str, dict[str, Any]]) -> Table:
    """One row a figure that all have, one column a placement."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure, label in ROWS:
        if any(figure not in score for score in columns.values()):
            continue
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
    table = score_table(title, {label: measured[key] for key, label in names.items()})
    table.caption, table.caption_justify = "\n".join(_tradeoff_words(measured)), "left"
    return table


def _tradeoff_words(measured: dict[str, Any]) -> list[str]:
    words = []
    if "tradeoff" in measured:
        tried = "; ".join(
            f"price {point['balance_price']:g}: {point['nodes_visited']:.3f} nodes visited, "
            f"load {point['load_max_over_mean']:.3f}, step x {point['step_over_usual']:.3f}"
            for point in measured["tradeoff"]["points"]
        )
        words.append(f"balance price {measured['tradeoff']['balance_price']:g} is fastest here, of drafts at {tried}")
    if "gate" in measured:
        verdict = "worth moving" if measured["gate"]["worth_it"] else "leave it"
        words.append(f"{verdict}: {measured['gate']['reason']}")
    return words


def counts_plan_table(plan: Plan) -> Table:
    measured = plan.measured
    counts = measured["counts"]
    without = counts["layers_without_load"]
    kept = f"; {without} without load keep the linear placement" if without else ""
    names = {"before": "before", "eplb": "EPLB", "after": "plan"}
    table = score_table(
        f"fitted and judged on {counts['source']}: {counts['layers']} layers{kept}",
        {label: measured[key] for key, label in names.items()},
    )
    table.caption, table.caption_justify = measured["says"], "left"
    return table


def counts_table(found: dict[str, Any]) -> Table:
    table = score_table(f"judged on {found['judged_on']}", {"plan": found["plan"]} | found["baselines"])
    if found["baselines"]:
        table.caption, table.caption_justify = f"baselines are fitted on {found['fitted_on']}", "left"
    return table


def slots_table(found: dict[str, Any]) -> Table:
    table = Table(title="held-out requests, homes as recorded or random", title_justify="left", caption_justify="left")
    for name in ("slots", "x experts", "per GPU", "other nodes visited", "saved", "load max/mean"):
        table.add_column(name, justify="right")
    for point in found["curve"]:
        table.add_row(
            str(point["num_slots"]),
            f"{point['times_experts']:.2f}",
            str(point["rows_per_rank"]),
            f"{point['nodes_visited']:.3f}",
            f"{point['saved']:.0%}",
            f"{point['load_max_over_mean']:.3f}",
        )
    if "goal" in found:
        table.caption = _goal_words(found["goal"], found["fewest"], found["curve"][-1])
    return table


def _goal_words(goal: float, fewest: dict[str, Any] | None, last: dict[str, Any]) -> str:
    if fewest is None:
        return f"no point saves {goal:.0%}; the last saves {last['saved']:.0%}: try a larger --to"
    return (
        f"{goal:.0%} less traffic: {fewest['num_slots']} slots, {fewest['rows_per_rank']} per GPU "
        f"(saves {fewest['saved']:.0%})"
    )


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
    moves = f"{figures['moves']} experts in {figures['rounds']} rounds, {figures['bytes'] / 1e6:.1f} MB"
    done = (
        f"to move: {moves}; planned in {result.plan_s:.1f} s, nothing was changed"
        if result.decision.startswith("would")
        else f"moved: {moves}; planned in {result.plan_s:.1f} s, copied in {result.copy_s:.2f} s, switched in "
        f"{result.switch_s:.2f} s"
    )
    table.caption = f"{result.decision}: {result.reason}\nepoch {figures['epoch']}; {done}"
    table.caption_justify = "left"
    return table
