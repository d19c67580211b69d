"""The keeper: who serves. It notices ranks that are lost, has the others go on, and brings new ones in.

One thread makes every change of membership, one after the other: news come in from the threads that take events, from
the watch (signs of life, new actors that are ready, seats that operators want), and wait their turn.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from cluster.answers import answer
from cluster.config import FaultsConfig
from cluster.crew import Crew, Hand, ask, dismiss
from cluster.ledger import Ledger
from cluster.outcomes import Formed
from cluster.post import Post
from placement.core import Placement
from placement.errors import InputError, MoetisError

GIVE_UP_S = 120.0
LOADING_S = 600.0
# Ranks that lose a peer say so within moments of each other.
GRACE_S = 0.05
PAUSE_S = 0.5


class Keeper:
    """Keeps the seats taken. hands: by seat, who serves or is about to."""

    def __init__(
        self,
        crew: Crew,
        service: Any,
        ledger: Ledger,
        faults: FaultsConfig,
        *,
        num_seats: int,
        note: Callable[[str], None],
        failed: Callable[[MoetisError], None],
    ) -> None:
        self._crew = crew
        self._service = service
        self._ledger = ledger
        self._faults = faults
        self._num_seats = num_seats
        self.note = note
        self._failed = failed
        self.post = Post(ledger, self._report)
        self.hands: dict[int, Hand] = {}
        self.starting: dict[int, Hand] = {}
        self.wanted = tuple(range(num_seats))
        self.founding: int | None = None
        self._stopping = threading.Event()
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def begin(self, placement: Placement) -> None:
        """Start an actor on every seat, have them serve, and keep it so from now on."""
        self.note(f"starting {self._num_seats} workers and loading the model on each")
        self._placement = placement
        self.starting = {seat: self._crew.start(seat, placement) for seat in self.wanted}
        answer([hand.ready for hand in self.starting.values()])
        self.hands, self.starting = self.starting, {}
        self.note("forming the ranks")
        self._open(self._ask_to_form("initial placement"))
        self._thread.start()

    def stop(self) -> None:
        """No changes any more; what runs goes on."""
        self._stopping.set()
        self._news.put(None)
        if self._thread.is_alive():
            self._thread.join(self._faults.dead_after_s)

    @property
    def everyone(self) -> list[Hand]:
        return [*self.hands.values(), *self.starting.values()]

    def tell(self, change: Callable[[], None]) -> None:
        """Have the keeper's thread do this, in its turn."""
        self._news.put(change)

    # ------------------------------------------------------------------------------------------------------ news

    def _report(self, seat: int, founding: int, is_gone: bool, reason: str) -> None:
        self.tell(lambda: self.lost({seat: reason} if is_gone else {}, founding, reason))

    def _run(self) -> None:
        while (change := self._news.get()) is not None and not self._stopping.is_set():
            try:
                change()
            except MoetisError as error:
                if not self._stopping.is_set():
                    self._give_up(error)

    def _give_up(self, error: MoetisError) -> None:
        self.founding = None
        self.post.close()
        self._ledger.close(str(error))
        self._failed(error)

    def lost(self, gone: dict[int, str], founding: int, reason: str) -> None:
        """Ranks are gone, or broke off (gone is empty then): those that are left go on. Old news are none."""
        if founding != self.founding:
            return
        time.sleep(GRACE_S)
        self._reform(gone, f"seat {min(gone)} was lost: {reason}" if gone else f"the ranks broke off: {reason}")

    def joined(self, hand: Hand) -> None:
        """A new actor has loaded its model: it takes its seat."""
        seat = hand.member.seat
        if self.starting.get(seat) is not hand:
            return
        del self.starting[seat]
        self.hands[seat] = hand
        self._reform({}, f"seat {seat} is taken again")

    def failed_to_start(self, hand: Hand, reason: str) -> None:
        """A new actor died before it was ready. The next heartbeat tries again."""
        self.note(f"seat {hand.member.seat} could not be taken: {reason}")
        self.starting.pop(hand.member.seat, None)

    def scale(self, wanted: tuple[int, ...]) -> None:
        """Drain the seats that are not wanted any more, and start those that are wanted anew."""
        self.wanted = wanted
        leaving = [seat for seat in self.hands if seat not in wanted]
        dismiss(self.starting.pop(seat) for seat in list(self.starting) if seat not in wanted)
        if leaving and len(leaving) < len(self.hands):
            try:
                answer(self._service.vacate.remote(leaving))
            except MoetisError as error:
                self.note(f"seats {leaving} are not drained: {error}")
                self.wanted = tuple(sorted({*wanted, *leaving}))
                return
            self._reform(dict.fromkeys(leaving, "drained"), f"seats {leaving} were drained")
        self.fill()

    def fill(self) -> None:
        """Start an actor on every wanted seat that nobody has taken."""
        missing = [seat for seat in self.wanted if seat not in self.hands and seat not in self.starting]
        if not missing:
            return
        try:
            self._placement = answer(self._service.plan_for.remote(range(self._num_seats))).placement
        except MoetisError as error:
            # What a new actor loads is a guess at what it will serve; an older one costs it some copies.
            self.note(f"the placement service does not answer yet: {error}")
        for seat in missing:
            self.starting[seat] = self._crew.start(seat, self._placement)

    # --------------------------------------------------------------------------------------------------- forming

    def _reform(self, gone: dict[int, str], reason: str) -> None:
        self.note(reason)
        self.founding = None
        self._drop(gone)
        self._part()
        self.post.close()
        self._ledger.interrupt()
        if self._faults.replace == "wait":
            self._await_replacements()
        self._open(self._form(reason))
        if self._faults.replace == "later":
            self.fill()

    def _open(self, formed: Formed) -> None:
        self.founding = formed.epoch
        self.post.open(self.hands, formed.epoch)
        self.note(f"{len(self.hands)} ranks serve epoch {formed.epoch}")

    def _form(self, reason: str) -> Formed:
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            if not self.hands:
                self._await_replacements()
            try:
                return self._ask_to_form(reason)
            except InputError as error:
                if self._faults.replace == "never":
                    raise
                self.note(f"waiting for a replacement: {error}")
                self._part()
                self._await_replacements()
            except MoetisError as error:
                if time.monotonic() > deadline or self._stopping.is_set():
                    raise
                self.note(f"forming again: {error}")
                time.sleep(PAUSE_S)
                self._part()

    def _ask_to_form(self, reason: str) -> Formed:
        members = [hand.member for hand in self.hands.values()]
        formed: Formed = answer(self._service.form.remote(members, reason))
        return formed

    def _part(self) -> None:
        """Have all leave. Who does not answer is not among them any more."""
        _, silent = ask(self.hands.values(), lambda actor: actor.leave.remote(), self._faults.dead_after_s)
        self._drop(silent)

    def _drop(self, gone: Iterable[int]) -> None:
        dismiss(self.hands.pop(seat) for seat in gone if seat in self.hands)

    def _await_replacements(self) -> None:
        if self._faults.replace == "never":
            raise MoetisError("too few ranks are left, and faults.replace is 'never'")
        self.fill()
        hands = list(self.starting.values())
        _, silent = ask(hands, lambda actor: actor.ready.remote(), LOADING_S)
        for hand in hands:
            seat = hand.member.seat
            if seat in silent:
                self.failed_to_start(hand, silent[seat])
            else:
                self.hands[seat] = self.starting.pop(seat)
