"""The book: who serves what, in memory and in the history, and what other members would serve.

Ranks that form, and epochs that serve already, do not wait for a disk: where the history can't be written it says less,
and the log says so. Only what is yet to be enacted must be stored first, which is the service's to see to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster import history as states
from cluster.forming import room
from cluster.history import History, Member
from placement.errors import ConfigError
from placement.planfile import Plan
from placement.seats import carry_over, topology_of, uses_every_rank
from workers.vitals import Holdings

EPOCHS_KEPT = 4

logger = logging.getLogger(__name__)


class Book:
    """current: the plan of the epoch that is served. members: who serves it, in the order of their ranks; none while
    they form. initial: the plan to start with, for all seats of its topology."""

    def __init__(self, history: History, initial: Plan) -> None:
        self.history = history
        self.initial = initial
        self.current = initial
        self.members: tuple[Member, ...] = ()
        self._everyone = tuple(range(initial.topology.num_ranks))
        self._lately: dict[int, tuple[Plan, tuple[int, ...]]] = {initial.placement.epoch: (initial, self._everyone)}
        self._is_first = True

    @property
    def seats(self) -> tuple[int, ...]:
        return tuple(member.seat for member in self.members)

    def now_serves(self, plan: Plan, members: tuple[Member, ...]) -> None:
        self.current, self.members = plan, members
        self._lately[plan.placement.epoch] = plan, self.seats
        for epoch in sorted(self._lately)[:-EPOCHS_KEPT]:
            del self._lately[epoch]

    def read(self) -> list[tuple[int, str]]:
        """Take up what the history says was served and by whom. Returns the changes that were under way, with their
        states; none where the ranks have to form anew first."""
        last, unfinished = self.history.served(), self.history.unfinished()
        self._is_first = last is None and not unfinished
        if last is None:
            return []
        self.current = last
        newest = max([last.placement.epoch, *(epoch for epoch, _ in unfinished)])
        members = self.history.members(newest)
        if not members or any(state == states.FORMING for _, state in unfinished):
            return []
        self.now_serves(last, members)
        return unfinished

    def next_epoch(self) -> int:
        """An epoch that no plan has used; where the history can't be read, one after all that are known here."""
        least = self.current.placement.epoch + 1
        try:
            return max(self.history.next_epoch(), least)
        except ConfigError as error:
            logger.warning("%s", error)
            return least

    # ------------------------------------------------------------------------------------------- what is to serve

    def plan_for(self, members: tuple[Member, ...], held: Sequence[Holdings], load: NDArray[np.float64]) -> Plan:
        """What these members, who have left what they served, are to serve under a new epoch.

        The placement of the epoch they served, where their seats are the same; the last one that these very seats
        served, where ranks have joined; else the present one with as little moved as it takes. load [L, E]. Raises
        PlacementError where they can't hold every expert.
        """
        seats = tuple(member.seat for member in members)
        newest = max(holdings.epoch for holdings in held)
        self._settle_parted(newest)
        base, base_seats = self._served(newest)
        is_first, self._is_first = self._is_first, False
        if is_first and base is self.initial and seats == base_seats:
            return base
        epoch = max(self.next_epoch(), newest + 1)
        if seats == base_seats:
            return replace(base, placement=base.placement.with_epoch(epoch))
        if len(seats) > len(base_seats):
            rows = self.initial.placement.rows_per_rank
            known = self.known(
                lambda plan, its: (
                    its == seats and plan.placement.rows_per_rank == rows and uses_every_rank(plan.placement)
                )
            )
            if known is not None:
                return replace(known, placement=known.placement.with_epoch(epoch))
        most_rows = room(held, base.placement.num_layers)
        placement = carry_over(base.placement, base_seats, seats, load, most_rows=most_rows)
        topology = topology_of(self.initial.topology, seats)
        return Plan(placement=placement.with_epoch(epoch), topology=topology, measured={})

    def _served(self, epoch: int) -> tuple[Plan, tuple[int, ...]]:
        """The plan of an epoch that ranks serve, and by which seats."""
        if epoch in self._lately:
            return self._lately[epoch]
        return self.history.plan(epoch), tuple(member.seat for member in self.history.members(epoch))

    def known(self, fits: Callable[[Plan, tuple[int, ...]], bool]) -> Plan | None:
        """The newest plan that served and fits, told each plan and its seats."""
        try:
            found = self.history.served(fits)
        except ConfigError as error:
            logger.warning("%s", error)
            found = None
        return found or (self.initial if fits(self.initial, self._everyone) else None)

    # ------------------------------------------------------------------------------------------- what has happened

    def form(self, plan: Plan, members: tuple[Member, ...], reason: str) -> None:
        """These members begin to form for plan; nobody serves until they have."""
        self.members = ()
        detail = {"reason": reason, "seats": [member.seat for member in members]}
        try:
            if plan.placement.epoch < self.history.next_epoch():
                self.history.add_again(plan.placement.epoch, states.FORMING, detail, members)
            else:
                self.history.add(plan, states.FORMING, detail, members)
        except ConfigError as error:
            logger.warning("epoch %d is formed without being stored: %s", plan.placement.epoch, error)

    def tell(self, epoch: int, state: str, detail: dict[str, Any] | None = None) -> None:
        """Note what has happened already: a history that can't be written does not undo it."""
        try:
            self.history.advance(epoch, state, detail)
        except ConfigError as error:
            logger.warning("epoch %d is %s, but %s", epoch, state, error)

    def leave(self, plan: Plan, detail: dict[str, Any]) -> None:
        """A plan is not enacted."""
        try:
            self.history.add(plan, states.LEFT, detail)
        except ConfigError as error:
            logger.warning("a plan was left (%s), but %s", detail["reason"], error)

    def _settle_parted(self, served: int) -> None:
        """The ranks have left: what is under way in the history ends here, served if any of them got so far."""
        try:
            for epoch, state in self.history.unfinished():
                if epoch == served:
                    self.history.advance(epoch, states.DONE, {"reason": "a rank was lost after the switch"})
                else:
                    self.history.advance(epoch, states.ABORTED, {"reason": f"a rank was lost when it was {state}"})
        except ConfigError as error:
            logger.warning("%s", error)
