"""How sure a held-out figure is: requests, not tokens, are the independent draws."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """after / before of a cost summed over requests, with a 95% interval from resampling the requests.

    holds: whether the whole interval lies below 1, so that the gain is there.
    """

    ratio: float
    low: float
    high: float
    num_tokens: int
    num_requests: int

    @property
    def holds(self) -> bool:
        return self.high < 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


def compare(before: NDArray[np.int32], after: NDArray[np.int32], request: NDArray[np.int64], seed: int = 0) -> Ratio:
    """Bootstrap over requests: before, after [T] the cost of each token (nodes visited over layers), request [T].

    Nothing visited before counts as a ratio of 1: there was nothing to gain.
    """
    requests, owner = np.unique(request, return_inverse=True)
    old = np.bincount(owner, weights=before)
    new = np.bincount(owner, weights=after)
    drawn = np.random.default_rng(seed).multinomial(len(requests), np.full(len(requests), 1 / len(requests)), RESAMPLES)
    low, high = np.percentile(_ratio(drawn @ new, drawn @ old), (2.5, 97.5))
    return Ratio(
        ratio=float(_ratio(new.sum(), old.sum())),
        low=float(low),
        high=float(high),
        num_tokens=len(request),
        num_requests=len(requests),
    )


def _ratio(new: Any, old: Any) -> Any:
    return np.where(old > 0, new / np.where(old > 0, old, 1), 1.0)
