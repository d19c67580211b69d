"""The table of `moetis evaluate`: a column a placement, a row a figure, with 95% intervals over requests."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from cluster.comparison import Comparison
from placement.comparing import PhaseCost
from placement.intervals import Interval

SCORE_ROWS = (
    ("nodes_visited", "other nodes visited per token and layer"),
    ("ranks_visited", "other ranks visited per token and layer"),
    ("load_max_over_mean", "load max/mean over ranks"),
    ("node_load_max_over_mean", "load max/mean over nodes"),
)
PART_ROWS = (
    ("compute_s", "  computing"),
    ("miss_s", "  + misses"),
    ("dispatch_s", "  dispatch"),
    ("combine_s", "  combine"),
)


def comparison_table(found: Comparison) -> Table:
    table = Table(title=f"judged on {found.judged_on}, homes: {found.homes}", title_justify="left")
    table.add_column("")
    for name in found.assessed:
        table.add_column(escape(name), justify="right")
    everyone = list(found.assessed.values())
    table.add_row("slots per layer", *(str(one.num_slots) for one in everyone))
    for figure, label in SCORE_ROWS:
        table.add_row(label, *(_with(getattr(one.score, figure), one.intervals.get(figure)) for one in everyone))
    for name in everyone[0].phases:
        table.add_section()
        _phase_rows(table, name, [one.phases[name] for one in everyone], has_cache=found.serving.gpu_share < 1)
    table.caption, table.caption_justify = _caption(found), "left"
    return table


def _phase_rows(table: Table, name: str, phases: list[PhaseCost], *, has_cache: bool) -> None:
    costs = [phase.cost for phase in phases]
    table.add_row(
        f"{name} step of {costs[0].tokens_per_step:.0f} tokens, ms",
        *(_with(1e3 * phase.cost.mean_s, _times(phase.interval("mean_s"), 1e3)) for phase in phases),
    )
    if len(costs) > 1:
        table.add_row("  the plan's over this", *(f"{costs[0].mean_s / cost.mean_s:.3f}" for cost in costs))
    table.add_row("  p99 of the steps", *(f"{1e3 * cost.p99_s:.3f}" for cost in costs))
    for figure, label in PART_ROWS:
        table.add_row(label, *(f"{1e3 * getattr(cost, figure):.3f}" for cost in costs))
    for level in costs[0].bytes_per_token:
        table.add_row(
            f"  KB a token over {escape(level)} links", *(f"{cost.bytes_per_token[level] / 1e3:.1f}" for cost in costs)
        )
    table.add_row(
        "  load max/mean per step, mean and p99",
        *(f"{cost.step_imbalance:.3f}, {cost.step_imbalance_p99:.3f}" for cost in costs),
    )
    if has_cache:
        table.add_row("  expert reads that find the GPU", *(f"{cost.hit_rate:.1%}" for cost in costs))


def _caption(found: Comparison) -> str:
    stand_in = [name for name, phase in next(iter(found.assessed.values())).phases.items() if phase.stand_in]
    lines = [f"± 95% over requests; step times of the MoE layers alone, modelled with {escape(found.sizes)}"]
    if stand_in:
        lines.append(f"the trace marks no tokens as {' or '.join(stand_in)}: all of its tokens stand for them")
    return "\n".join(lines)


def _times(interval: Interval | None, factor: float) -> Interval | None:
    return None if interval is None else (factor * interval[0], factor * interval[1])


def _with(value: float, interval: Interval | None) -> str:
    return f"{value:.3f}" if interval is None else f"{value:.3f} ±{(interval[1] - interval[0]) / 2:.3f}"
