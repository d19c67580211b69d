"""The gate: what a change saves over a horizon against what its moves cost. It may say no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from placement.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a change is worth it: seconds saved over the horizon against seconds that the moves cost."""

    worth_it: bool
    saved_s: float
    moving_s: float
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "worth_it": self.worth_it,
            "saved_s": self.saved_s,
            "moving_s": self.moving_s,
            "reason": self.reason,
        }


def weigh(
    *,
    step_before_s: float,
    step_after_s: float,
    steps_in_horizon: float,
    num_copies: int,
    expert_bytes: float,
    copy_bandwidth: float,
    slowdown: float = 1.0,
) -> Verdict:
    """The gate. step_..._s: modelled step times; copy_bandwidth: bytes/s at which weights move in all.

    slowdown: the share of serving time lost while weights move (1: serving stands still). Raises ConfigError where the
    horizon, the bytes or the bandwidth make no sense.
    """
    if steps_in_horizon < 0 or copy_bandwidth <= 0 or expert_bytes < 0:
        raise ConfigError(
            f"the gate needs steps >= 0, bytes >= 0 and a bandwidth above 0; got {steps_in_horizon}, {expert_bytes}, "
            f"{copy_bandwidth}"
        )
    saved = (step_before_s - step_after_s) * steps_in_horizon
    moving = num_copies * expert_bytes / copy_bandwidth * slowdown
    if num_copies == 0:
        return Verdict(worth_it=False, saved_s=saved, moving_s=0.0, reason="nothing would move")
    if saved <= 0:
        return Verdict(worth_it=False, saved_s=saved, moving_s=moving, reason="no step would be faster")
    reason = f"{saved:.3g} s saved over the horizon, {moving:.3g} s to move {num_copies} experts"
    return Verdict(worth_it=saved > moving, saved_s=saved, moving_s=moving, reason=reason)
