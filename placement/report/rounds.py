"""The rounds of a migration as figures: who exchanges how much, and how long the links need for it."""

from __future__ import annotations

from dataclasses import dataclass

from placement.migration import MigrationPlan, Round
from placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigure:
    """One round: pairs of ranks that exchange experts, experts copied, bytes, and seconds on otherwise idle links.

    num_bytes and seconds are None where the size of an expert is not known.
    """

    pairs: int
    moves: int
    num_bytes: int | None
    seconds: float | None


def round_figures(migration: MigrationPlan, topology: Topology, *, sized: bool) -> tuple[RoundFigure, ...]:
    """sized: whether migration.expert_bytes is the true size. Pairs copy side by side and share a node's link."""
    return tuple(
        RoundFigure(
            pairs=len({frozenset((move.source.rank, move.target.rank)) for move in moves}),
            moves=len(moves),
            num_bytes=len(moves) * migration.expert_bytes if sized else None,
            seconds=_seconds(moves, topology, migration.expert_bytes) if sized else None,
        )
        for moves in migration.rounds
    )


def _seconds(moves: Round, topology: Topology, expert_bytes: int) -> float:
    """Of the busiest link: each copy leaves one group and enters another at every level where the two differ."""
    experts: dict[tuple[int, int, bool], int] = {}
    for move in moves:
        for level, groups in enumerate(topology.groups):
            ends = int(groups[move.source.rank]), int(groups[move.target.rank])
            if ends[0] != ends[1]:
                for group, is_arrival in zip(ends, (False, True), strict=True):
                    experts[level, group, is_arrival] = experts.get((level, group, is_arrival), 0) + 1
    return max(
        topology.links[level].latency_s + count * expert_bytes / topology.links[level].bandwidth
        for (level, _, _), count in experts.items()
    )
