"""95% intervals over requests, which are the independent draws; tokens of one request are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

CONFIDENCE = 0.95
Interval = tuple[float, float]


def jackknife(parts: NDArray[Any], statistic: Callable[[NDArray[Any]], float]) -> Interval | None:
    """An interval for statistic(sum of parts): parts [G, ...] are sums of G groups of requests.

    Each group is left out in turn (the delete-a-group jackknife; Student's t with G - 1 degrees of freedom). None for
    one group, of which nothing can be said.
    """
    num_groups = len(parts)
    if num_groups < 2:
        return None
    total = parts.sum(axis=0)
    without = np.array([statistic(total - part) for part in parts])
    deviation = np.sqrt((num_groups - 1) / num_groups * ((without - without.mean()) ** 2).sum())
    return _around(statistic(total), float(deviation), num_groups)


def random_groups(value: float, by_group: NDArray[np.float64]) -> Interval | None:
    """An interval around value, of which by_group [G] are estimates from G disjoint groups of requests each.

    The spread of the groups over the root of their number (the random-groups method; Wolter, Introduction to Variance
    Estimation, chapter 2). None for one group.
    """
    num_groups = len(by_group)
    if num_groups < 2:
        return None
    return _around(value, float(by_group.std(ddof=1) / np.sqrt(num_groups)), num_groups)


def _around(value: float, deviation: float, num_groups: int) -> Interval:
    half = float(student.ppf((1 + CONFIDENCE) / 2, num_groups - 1)) * deviation
    return value - half, value + half
