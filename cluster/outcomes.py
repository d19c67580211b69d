"""What the placement service tells of what it did."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.history import Member
from placement.migration import MigrationPlan
from placement.planfile import Plan

PAYS = "the plan pays on held-out requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceResult:
    """What a rebalance did. decision: 'applied', 'left' (not worth it) or 'aborted'; of a preview 'would apply' or
    'would leave'. plan holds what was measured.

    migration is None where nothing was to be moved. copy_s is the time of the rounds, switch_s from commit to the new
    epoch on every rank.
    """

    decision: str
    reason: str
    before: Plan
    plan: Plan
    migration: MigrationPlan | None
    plan_s: float
    copy_s: float = 0.0
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """Who serves now, and what they serve: fetched experts came from peers, restored ones from the checkpoint."""

    epoch: int
    members: tuple[Member, ...]
    fetched: int
    restored: int
