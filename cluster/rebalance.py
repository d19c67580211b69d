"""`moetis rebalance`: ask the service of a running cluster to plan and enact, once, on a schedule, or by drift."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.answers import answer
from cluster.config import ClusterConfig
from cluster.drifting import DriftCheck
from cluster.joining import joined_service
from cluster.outcomes import RebalanceResult
from placement.errors import ConfigError, MoetisError

MOST_FAILURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one round did. check: by drift only. result is None where no plan was due."""

    check: DriftCheck | None
    result: RebalanceResult | None


def run_rebalance(
    config: ClusterConfig, *, by_drift: bool = False, dry_run: bool = False, most_copies: int | None = None
) -> RoundResult:
    """One round: where by_drift, only if traffic has drifted; a dry run changes nothing. With most_copies the
    placement stays but for so many copies, and the load is levelled."""
    with joined_service(config) as service:
        check: DriftCheck | None = answer(service.drift.remote()) if by_drift else None
        if check is not None and not check.due:
            return RoundResult(check=check, result=None)
        ask = service.preview if dry_run else service.rebalance
        ref = ask.remote(most_copies=most_copies)
        return RoundResult(check=check, result=answer(ref))


def run_rounds(
    one_round: Callable[[], None],
    *,
    every_s: float,
    rounds: int | None,
    failed: Callable[[MoetisError], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Rounds without end, or so many. One that fails is told and the next one tried; after five in a row the last
    error is raised, and at once where the first round finds no cluster."""
    failures = done = 0
    while True:
        try:
            one_round()
            failures = 0
        except MoetisError as error:
            failures += 1
            if failures == MOST_FAILURES or (done == 0 and isinstance(error, ConfigError)):
                raise
            failed(error)
        done += 1
        if done == rounds:
            return
        sleep(every_s)
