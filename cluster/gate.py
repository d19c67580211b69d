"""The gates: whether a plan is worth enacting."""

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


def gate_levelled(measured: dict[str, Any], min_gain: float) -> str | None:
    """As `gate` for a plan that levels the load alone: the heaviest rank's load must fall by min_gain of itself, and
    other-node visits must not rise by as much."""
    before, after = (measured[name]["load_max_over_mean"] for name in ("before", "after"))
    if before - after < min_gain * before:
        return (
            f"the heaviest rank would carry {after:.3f} of the mean load instead of {before:.3f} on held-out requests; "
            f"it must be {min_gain:.1%} less"
        )
    rise = measured["trust"]["after_over_before"]["ratio"] - 1
    if rise > min_gain:
        return f"the load would be level, but other-node visits would rise by {rise:.1%} on held-out requests"
    return None
