"""The gate: whether a plan is worth enacting."""

from __future__ import annotations

from typing import Any


def gate(measured: dict[str, Any], min_gain: float) -> str | None:
    """Why a plan is not worth enacting, from its held-out figures, or None if it is.

    It must save min_gain of the other-node visits, and the 95% interval over requests must leave no doubt of a gain.
    """
    visits = measured["trust"]["after_over_before"]
    gain = 1 - visits["ratio"]
    if gain < min_gain:
        return (
            f"it would save {gain:.1%} of other-node visits on held-out requests; at least {min_gain:.1%} is asked for"
        )
    if not visits["holds"]:
        low, high = 1 - visits["high"], 1 - visits["low"]
        return (
            f"it would save {gain:.1%} of other-node visits, but {visits['num_requests']} held-out requests leave room "
            f"for no gain at all (95% interval {low:.1%} to {high:.1%}); record more traffic"
        )
    return None
