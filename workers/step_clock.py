"""The step clock: how long a rank's last steps took, whole and in the parts of its expert layers.

Host time: on a CPU it is what the step took; on a GPU kernels run on after the call, so the parts say little there and
the whole alone counts.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

STEPS_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """One step of one rank. total_s from its first to its last work; the parts are summed over its MoE layers. began_s
    by time.perf_counter, which all processes of a machine share on Linux.

    dispatch_s and combine_s hold the wait for slower ranks; compute_s is this rank's own.
    """

    step: int
    began_s: float
    total_s: float
    dispatch_s: float
    compute_s: float
    combine_s: float


class StepClock:
    """begin, layer and end run on the serving thread; recent from any. total_s: of all steps so far."""

    def __init__(self) -> None:
        self._kept: deque[StepSeconds] = deque(maxlen=STEPS_KEPT)
        self.total_s = 0.0
        self.begin()

    def begin(self) -> None:
        self._start = time.perf_counter()
        self._dispatch_s = self._compute_s = self._combine_s = 0.0

    def layer(self, start: float, dispatched: float, computed: float, combined: float) -> None:
        """The moments, by time.perf_counter, between the parts of one layer."""
        self._dispatch_s += dispatched - start
        self._compute_s += computed - dispatched
        self._combine_s += combined - computed

    def end(self, step: int) -> float:
        """Returns the seconds since begin."""
        self._kept.append(
            StepSeconds(
                step=step,
                began_s=self._start,
                total_s=time.perf_counter() - self._start,
                dispatch_s=self._dispatch_s,
                compute_s=self._compute_s,
                combine_s=self._combine_s,
            )
        )
        self.total_s += self._kept[-1].total_s
        return self._kept[-1].total_s

    def recent(self) -> list[StepSeconds]:
        """The last steps, oldest first; 4,096 of them at most."""
        return list(self._kept)
