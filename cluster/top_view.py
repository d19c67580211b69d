"""A look at a running cluster, for people and for machines."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.top import Look, Rates, copied_share
from workers.vitals import WorkerStatus

BAR, MOST_ROWS = 16, 64


def look_to_dict(name: str, now: Look, rates: Rates) -> dict[str, Any]:
    """One JSON object; rates are since the last one, or since the start in the first."""
    return {
        "name": name,
        "epoch": now.plan.placement.epoch,
        "progress": now.progress,
        "copied_share": copied_share(now.progress),
        "problem": now.problem,
        "seconds": rates.seconds,
        "tokens_per_s": rates.tokens_per_s,
        "steps_per_s": rates.steps_per_s,
        "nodes_visited": rates.nodes_visited,
        "nodes_visited_promised": _promised(now),
        "ranks_visited": rates.ranks_visited,
        "load_max_over_mean": rates.load_max_over_mean,
        "cache_hit_rate": rates.total_hit_rate,
        "ranks": [
            {
                "rank": one.rank,
                "node": node,
                "epoch": one.epoch,
                "alive": one.alive,
                "error": one.error,
                "steps": one.steps,
                "load_over_mean": load,
                "cache_hit_rate": hit_rate,
                "experts": one.experts,
                "host_slab_bytes": one.host_slab_bytes,
                "slot_bytes": one.slot_bytes,
            }
            for node, one, load, hit_rate in _rows(now, rates)
        ],
    }


def look_view(name: str, now: Look, rates: Rates) -> RenderableType:
    """A few lines on the whole, and a row a rank."""
    placement, topology = now.plan.placement, now.plan.topology
    head = Text.assemble(
        (name, "bold"),
        f"  epoch {placement.epoch}  {topology.num_ranks} ranks in {topology.num_nodes} nodes ({topology.name})  ",
        f"{placement.num_layers} layers x {placement.num_experts} experts",
    )
    return Group(head, _whole(now, rates), _migration(now.progress), *_trouble(now), _ranks(now, rates))


def _whole(now: Look, rates: Rates) -> Text:
    since = "since the start" if rates.seconds is None else f"last {rates.seconds:.0f} s"
    promised = _promised(now)
    hops = (
        f"{_figure(rates.nodes_visited)} other nodes and {_figure(rates.ranks_visited)} other ranks a token and layer"
    )
    plan = "" if promised is None else f" (the plan said {promised:.2f} nodes)"
    return Text(
        f"{since}: {_figure(rates.tokens_per_s, 0)} tokens/s, {_figure(rates.steps_per_s, 1)} steps/s, {hops}{plan}, "
        f"load max/mean {_figure(rates.load_max_over_mean)}, hit rate {_percent(rates.total_hit_rate)}"
    )


def _migration(progress: str) -> Text:
    share = copied_share(progress)
    if share is None:
        return Text(f"service: {progress}", style="" if progress == "idle" else "yellow")
    return Text(f"service: {_bar(share, 1.0)} {progress}", style="yellow")


def _trouble(now: Look) -> list[Text]:
    trouble = [] if now.problem is None else [Text(now.problem, style="bold red")]
    return trouble + [
        Text(f"rank {one.rank}: {one.error}", style="bold red") for one in now.ranks if one.error is not None
    ]


def _ranks(now: Look, rates: Rates) -> Table:
    table = Table(expand=False)
    for column in ("rank", "node", "epoch", "state", "steps"):
        table.add_column(column, justify="right")
    table.add_column("load / mean")
    table.add_column("hit rate", justify="right")
    for column in ("experts", "host slab", "GPU slots"):
        table.add_column(column, justify="right")
    largest = max(rates.load_max_over_mean or 0.0, 1.0)
    rows = _rows(now, rates)
    for node, one, load, hit_rate in rows[:MOST_ROWS]:
        table.add_row(
            str(one.rank),
            str(node),
            str(one.epoch),
            "serving" if one.alive else Text("stopped", style="bold red"),
            f"{one.steps:,}",
            f"{_bar(load or 0.0, largest)} {_figure(load)}",
            _percent(hit_rate),
            f"{one.experts:,}",
            f"{one.host_slab_bytes / 1e6:,.1f} MB",
            f"{one.slot_bytes / 1e6:,.1f} MB",
        )
    if len(rows) > MOST_ROWS:
        table.caption = f"the first {MOST_ROWS} of {len(rows)} ranks; --json has all"
    return table


def _rows(now: Look, rates: Rates) -> list[tuple[int, WorkerStatus, float | None, float | None]]:
    """(node, status, load, hit rate) of each rank, in the order of the plan's topology.

    That may be smaller than the one that the ranks' numbers are of.
    """
    nodes = now.plan.topology.node_of_rank()[: len(now.ranks)].tolist()
    return list(zip(nodes, now.ranks, rates.load, rates.hit_rate, strict=True))


def _promised(now: Look) -> float | None:
    """What the plan in force expected on held-out requests."""
    after = now.plan.measured.get("after")
    return after.get("nodes_visited") if isinstance(after, dict) else None


def _bar(part: float, whole: float) -> str:
    filled = round(BAR * min(1.0, part / whole))
    return "█" * filled + "░" * (BAR - filled)


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
