"""What past plans promised on held-out requests, and what was measured of them afterwards."""

from __future__ import annotations

from dataclasses import dataclass

# Traffic changes between two plans: so much more than the upper end of its interval still counts as kept.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PastEpoch:
    """One plan of a cluster's past. at: ISO 8601; state: what became of it; reason: why, in words.

    before, promised: other nodes visited per token and layer without and with it, on held-out requests of its day;
    most: the upper end of the promise's 95% interval. found: the same figure, measured once it served, on the traffic
    of that time; found_before: of the placement before it, on that same traffic. None where it is not known.
    """

    epoch: int
    at: str
    state: str
    reason: str
    before: float | None = None
    promised: float | None = None
    most: float | None = None
    found: float | None = None
    found_before: float | None = None

    @property
    def kept(self) -> bool | None:
        """Whether at most so much was found as was promised; None where one of the two is not known.

        Where both placements were measured on the same traffic, what counts is the share that was saved.
        """
        if self.promised is None or self.found is None:
            return None
        most = max(self.promised, self.most or 0.0)
        if self.before and self.found_before:
            most *= self.found_before / self.before
        return self.found <= most * (1 + TOLERANCE)

    @property
    def verdict(self) -> str:
        """In a table's cell."""
        return {None: "not known yet", True: "kept", False: "not kept"}[self.kept]


def promises_in_words(epochs: tuple[PastEpoch, ...]) -> str:
    """One sentence on all of them."""
    known = [epoch.kept for epoch in epochs if epoch.kept is not None]
    if not known:
        return "No past plan has been measured after it served yet."
    return f"{sum(known)} of {len(known)} past plans that were measured afterwards kept their promise."
