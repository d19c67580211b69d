"""The post: brings waiting requests to their homes, and what is written there back to the ledger."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.actors.road import CALL_TIMEOUT_S
from cluster.crew import Hand, reason_of
from cluster.ledger import Ledger
from workers.requests import GenerationRequest

EVENT_WAIT_S = 0.5
PUMP_END_S = 5.0
# The home of what comes in while nobody serves: it gets one when it is sent.
NOBODY = -1

# Requests on their way, and the answer to come; None ends the thread that waits for them.
Sent = queue.SimpleQueue[tuple[list[GenerationRequest], Any] | None]
# (seat, founding, whether its process is gone, reason)
Report = Callable[[int, int, bool, str], None]


class Post:
    """Open while ranks serve together; what comes in meanwhile waits in the ledger. Two threads a rank wait for it."""

    def __init__(self, ledger: Ledger, report: Report) -> None:
        self._ledger = ledger
        self._report = report
        self._lock = threading.Lock()
        self._hands: dict[int, Hand] = {}
        self._founding: int | None = None
        self._pumps: list[threading.Thread] = []
        self._sent: dict[int, Sent] = {}
        self._turn = itertools.count()

    def open(self, hands: Mapping[int, Hand], founding: int) -> None:
        """These serve now, under the epoch at which they met: all that waits goes to them."""
        with self._lock:
            self._hands, self._founding = dict(hands), founding
            self._sent = {seat: queue.SimpleQueue() for seat in hands}
            self._pumps = [
                threading.Thread(target=self._pump, args=(hand, founding), name=f"events-{seat}", daemon=True)
                for seat, hand in hands.items()
            ]
            askers = [
                threading.Thread(
                    target=self._await_refusals,
                    args=(hand, founding, self._sent[seat]),
                    name=f"sent-{seat}",
                    daemon=True,
                )
                for seat, hand in hands.items()
            ]
            for thread in (*self._pumps, *askers):
                thread.start()
        self.send()

    def close(self) -> None:
        """They have left: take the last of what they wrote."""
        with self._lock:
            self._hands, self._founding = {}, None
            for sent in self._sent.values():
                sent.put(None)
            pumps, self._pumps = self._pumps, []
        for pump in pumps:
            pump.join(PUMP_END_S)

    def next_seat(self) -> int:
        """Homes in turn, so that ranks get the same number of requests."""
        seats = sorted(self._hands) or [NOBODY]
        return seats[next(self._turn) % len(seats)]

    def send(self, names: Sequence[str] | None = None) -> None:
        """What waits (of these names) goes to its home, or to another where that is gone. A refused request ends."""
        with self._lock:
            founding, hands = self._founding, self._hands
            if founding is None:
                return
            by_seat: dict[int, list[GenerationRequest]] = {}
            for seat, request in self._ledger.take(founding, names):
                home = seat if seat in hands else self.next_seat()
                self._ledger.move(request.request, home)
                by_seat.setdefault(home, []).append(request)
            for seat, mine in by_seat.items():
                self._sent[seat].put((mine, hands[seat].actor.submit.remote(mine, founding)))

    def cancel(self, name: str) -> None:
        """Tell the rank that works on a request to stop. One that is lost meanwhile is noticed elsewhere."""
        with self._lock:
            seat = self._ledger.seat_of(name)
            hand = None if seat is None else self._hands.get(seat)
        if hand is not None:
            hand.actor.cancel.remote(name)

    def _await_refusals(self, hand: Hand, founding: int, sent: Sent) -> None:
        """A thread of its own, so that a rank that hangs holds up nobody who sends to the others."""
        while (item := sent.get()) is not None:
            requests, ref = item
            try:
                refusals = ray.get(ref, timeout=CALL_TIMEOUT_S)
            except RayError as error:
                self._report(hand.member.seat, founding, isinstance(error, RayActorError), reason_of(error))
                return
            for request, refusal in zip(requests, refusals, strict=True):
                if refusal is not None:
                    self._ledger.refuse(request.request, founding, refusal)

    def _pump(self, hand: Hand, founding: int) -> None:
        while True:
            try:
                for event in ray.get(hand.actor.next_events.remote(EVENT_WAIT_S, founding)):
                    self._ledger.deliver(event, founding)
            except RayError as error:
                self._report(hand.member.seat, founding, isinstance(error, RayActorError), reason_of(error))
                return
