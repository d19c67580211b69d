"""A link for host memory that is pinned in part: what is pinned goes straight, the rest through a ring."""

from __future__ import annotations

from collections.abc import Sequence

from workers.bounce_ring import Bounced, BounceRing
from workers.links import NOTHING_UNDER_WAY, Arrival, Fence, Link, Pair


class _Both:
    def __init__(self, straight: Arrival, bounced: Bounced) -> None:
        self._straight = straight
        self._bounced = bounced

    def wait(self) -> None:
        self._straight.wait()
        self._bounced.wait()

    def done(self) -> bool:
        return self._bounced.done() and self._straight.done()

    def finish(self) -> None:
        self._straight.finish()
        self._bounced.finish()


class BounceLink:
    """straight: the link of what is pinned. urgent, patient: rings whose edges copy on the same streams as it does.
    pinned: the addresses at which a blob that is pinned may begin. One thread at a time may ask."""

    def __init__(self, straight: Link, *, urgent: BounceRing, patient: BounceRing, pinned: range) -> None:
        self.overlaps = straight.overlaps
        self.defers = straight.defers
        self._straight = straight
        self._urgent = urgent
        self._patient = patient
        self._pinned = pinned
        # By the address of a slot: what the rings may still have to submit to it.
        self._landing: dict[int, Bounced] = {}

    def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> Arrival:
        if self._landing:
            self._settle(pairs)
        through = [pair for pair in pairs if pair[1].data_ptr() not in self._pinned]
        if not through:
            return self._straight.copy(pairs, after=after, urgent=urgent)
        rest = [pair for pair in pairs if pair[1].data_ptr() in self._pinned]
        straight = self._straight.copy(rest, after=after, urgent=urgent) if rest else NOTHING_UNDER_WAY
        try:
            bounced = (self._urgent if urgent else self._patient).copy(through, after=after)
        except BaseException:
            straight.finish()
            raise
        for target, _ in through:
            self._landing[target.data_ptr()] = bounced
        return _Both(straight, bounced) if rest else bounced

    def _settle(self, pairs: Sequence[Pair]) -> None:
        """See to it that copies to one slot are submitted in the order in which they were asked for, even where nobody
        has waited for the earlier one."""
        self._landing = {place: each for place, each in self._landing.items() if not each.is_submitted()}
        for target, _ in pairs:
            earlier = self._landing.pop(target.data_ptr(), None)
            if earlier is not None:
                earlier.settle()

    def fence(self) -> Fence:
        return self._straight.fence()

    def close(self) -> None:
        self._urgent.close()
        self._patient.close()
        self._straight.close()
