"""The watch: asks every rank for signs of life, and the service for the seats that are wanted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.answers import answer
from cluster.config import FaultsConfig
from cluster.crew import Hand, ask, reason_of
from cluster.keeper import Keeper
from placement.errors import MoetisError
from workers.vitals import Pulse


def judge(pulses: Mapping[int, Pulse], hung_after_s: float) -> tuple[dict[int, str], str | None]:
    """Which ranks hang (by seat, with the reason), and why all must part, where no rank is to blame.

    A rank that waits is a rank in order: one that neither waits nor moves is what the others wait for. Where nobody
    waits for it, it is slow, as all are on a machine that has too much to do.
    """
    hung = {
        seat: f"its step has not come to an end for {pulse.still_s:.0f} s; it is at {pulse.at}"
        for seat, pulse in pulses.items()
        if pulse.serving and not pulse.waiting and pulse.still_s > hung_after_s
    }
    is_waited_for = len(pulses) == 1 or any(
        pulse.waiting and pulse.still_s > hung_after_s / 2 for pulse in pulses.values()
    )
    if hung and is_waited_for:
        return hung, min(hung.values())
    stopped = [pulse for pulse in pulses.values() if not pulse.serving]
    if stopped:
        return {}, stopped[0].error or "its engine has stopped"
    if pulses and all(pulse.waiting and pulse.still_s > hung_after_s for pulse in pulses.values()):
        return {}, f"all ranks have waited for each other for {hung_after_s:.0f} s"
    return {}, None


class Watch:
    """A thread that looks at everything once a heartbeat, and tells the keeper what it must do."""

    def __init__(self, keeper: Keeper, service: Any, faults: FaultsConfig) -> None:
        self._keeper = keeper
        self._service = service
        self._faults = faults
        self._write_errors: dict[int, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._faults.heartbeat_s):
            self._look_at_ranks()
            self._look_at_new_ones()
            self._look_at_wishes()

    def _look_at_ranks(self) -> None:
        keeper, founding = self._keeper, self._keeper.founding
        if founding is None:
            return
        hands = list(keeper.hands.values())
        pulses, silent = ask(hands, lambda actor: actor.pulse.remote(), self._faults.dead_after_s)
        if silent:
            reason = min(silent.values())
            keeper.tell(lambda: keeper.lost(silent, founding, reason))
            return
        self._tell_write_errors(pulses)
        hung, why = judge(pulses, self._faults.hung_after_s)
        if why is not None:
            keeper.tell(lambda: keeper.lost(hung, founding, why))

    def _tell_write_errors(self, pulses: Mapping[int, Pulse]) -> None:
        for seat, pulse in pulses.items():
            if pulse.write_errors > self._write_errors.get(seat, 0):
                self._keeper.note(
                    f"seat {seat} could not write its trace {pulse.write_errors} times: is the disk full? "
                    f"It serves on without"
                )
            self._write_errors[seat] = pulse.write_errors

    def _look_at_new_ones(self) -> None:
        keeper = self._keeper
        for hand in list(keeper.starting.values()):
            done, _ = ray.wait([hand.ready], timeout=0)
            if not done:
                continue
            keeper.tell(partial(self._take_in, hand))
        if keeper.founding is not None and self._faults.replace != "never":
            keeper.tell(keeper.fill)

    def _take_in(self, hand: Hand) -> None:
        try:
            ray.get(hand.ready)
        except RayError as error:
            self._keeper.failed_to_start(hand, reason_of(error))
        else:
            self._keeper.joined(hand)

    def _look_at_wishes(self) -> None:
        keeper = self._keeper
        try:
            wanted = answer(self._service.wanted.remote(), timeout_s=self._faults.dead_after_s)
        except MoetisError:
            # Killed: Ray starts it again, and it comes back with what it knew.
            return
        if wanted and wanted != keeper.wanted:
            keeper.tell(lambda: keeper.scale(wanted))
