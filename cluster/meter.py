"""The meter: looks at the ranks and the history every few seconds, and sets Ray's metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ray.util.metrics import Gauge

from cluster.history import History, HistoryEvent
from cluster.metrics import GAUGES, LABELS, Readings, Sample, history_readings, rank_readings
from placement.errors import MoetisError
from workers.vitals import WorkerStatus

logger = logging.getLogger(__name__)
PERIOD_S, STOP_TIMEOUT_S = 5.0, 2.0


class Meter:
    """A thread of the process that serves. Ranks that do not answer leave a gap, and count as not alive."""

    def __init__(self, statuses: Callable[[], list[WorkerStatus]], history: Path, period_s: float = PERIOD_S) -> None:
        self._statuses = statuses
        self._history = History(history)
        self._period_s = period_s
        self._gauges = {
            name: Gauge(name, description=text, tag_keys=(LABELS[name],) if name in LABELS else None)
            for name, text in GAUGES.items()
        }
        self._last: Sample | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=STOP_TIMEOUT_S)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._show(self._of_ranks())
            try:
                self._show(self._of_history())
            except MoetisError as error:
                logger.warning("metrics of the history are left out: %s", error)

    def _of_ranks(self) -> Readings:
        try:
            now = Sample(at_s=time.monotonic(), statuses=tuple(self._statuses()))
        except MoetisError:
            return {("moetis_ranks_alive", ""): 0.0, ("moetis_tokens_per_second", ""): 0.0}
        before, self._last = self._last, now
        return rank_readings(before, now)

    def _of_history(self) -> Readings:
        events = self._history.events()
        now = datetime.now(UTC)
        return history_readings(events, {event.epoch: _age_s(event, now) for event in events})

    def _show(self, readings: Readings) -> None:
        for (name, label), value in readings.items():
            self._gauges[name].set(value, tags={LABELS[name]: label} if name in LABELS else None)


def _age_s(event: HistoryEvent, now: datetime) -> float:
    return max(0.0, (now - datetime.fromisoformat(event.at)).total_seconds())
