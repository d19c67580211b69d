"""The post: brings waiting requests to their homes, and what is written there back to the ledger."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.exceptions import RayActorError, RayError

from cluster.actors import CALL_TIMEOUT_S
from cluster.crew import Hand, reason_of
from cluster.ledger import Ledger
from workers.requests import GenerationRequest

EVENT_WAIT_S = 0.5
PUMP_END_S = 5.0

# (seat, founding, whether its process is gone, reason)
Report = Callable[[int, int, bool, str], None]


class Post:
    """Open while ranks serve together; what comes in meanwhile waits in the ledger. One thread a rank takes events."""

    def __init__(self, ledger: Ledger, report: Report) -> None:
        self._ledger = ledger
        self._report = report
        self._lock = threading.Lock()
        self._hands: dict[int, Hand] = {}
        self._founding: int | None = None
        self._pumps: list[threading.Thread] = []
        self._turn = itertools.count()

    def open(self, hands: Mapping[int, Hand], founding: int) -> None:
        """These serve now, under the epoch at which they met: all that waits goes to them."""
        with self._lock:
            self._hands, self._founding = dict(hands), founding
            self._pumps = [
                threading.Thread(target=self._pump, args=(hand, founding), name=f"events-{seat}", daemon=True)
                for seat, hand in hands.items()
            ]
            for pump in self._pumps:
                pump.start()
        self.send()

    def close(self) -> None:
        """They have left: take the last of what they wrote."""
        with self._lock:
            self._hands, self._founding = {}, None
            pumps, self._pumps = self._pumps, []
        for pump in pumps:
            pump.join(PUMP_END_S)

    def next_seat(self) -> int:
        """Homes in turn, so that ranks get the same number of requests."""
        seats = sorted(self._hands) or [0]
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
            refs = {seat: hands[seat].actor.submit.remote(mine, founding) for seat, mine in by_seat.items()}
        for seat, ref in refs.items():
            try:
                refusals = ray.get(ref, timeout=CALL_TIMEOUT_S)
            except RayError as error:
                self._report(seat, founding, isinstance(error, RayActorError), reason_of(error))
                continue
            for request, refusal in zip(by_seat[seat], refusals, strict=True):
                if refusal is not None:
                    self._ledger.refuse(request.request, founding, refusal)

    def cancel(self, name: str) -> None:
        """Tell the rank that works on a request to stop."""
        with self._lock:
            founding, hand = self._founding, self._hands.get(self._ledger.seat_of(name) or 0)
        if founding is not None and hand is not None:
            try:
                ray.get(hand.actor.cancel.remote(name), timeout=CALL_TIMEOUT_S)
            except RayError as error:
                self._report(hand.member.seat, founding, isinstance(error, RayActorError), reason_of(error))

    def _pump(self, hand: Hand, founding: int) -> None:
        while True:
            try:
                for event in ray.get(hand.actor.next_events.remote(EVENT_WAIT_S, founding)):
                    self._ledger.deliver(event, founding)
            except RayError as error:
                self._report(hand.member.seat, founding, isinstance(error, RayActorError), reason_of(error))
                return
