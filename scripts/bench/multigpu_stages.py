"""What a process of the bench runs: its stages, one after the other."""

from __future__ import annotations

import time

from multigpu_crew import Crew


def live_correctness(which: int, crew: Crew) -> None:
    from multigpu_correct import stage_correctness

    stage_correctness(crew, which)


def live_measures(crew: Crew) -> None:
    """Stages that need the same processes; each imports what it needs, for quick starts of the others."""
    for stage in crew.job.stages:
        begun = time.perf_counter()
        if stage == "exchange":
            from multigpu_exchange import stage_exchange

            stage_exchange(crew)
        elif stage == "migration":
            from multigpu_migration import stage_migration

            stage_migration(crew)
        elif stage == "placement":
            from multigpu_placement import stage_placement

            stage_placement(crew)
        else:
            from multigpu_offload import stage_offload

            stage_offload(crew)
        crew.note(f"stage {stage}", seconds=time.perf_counter() - begun)
