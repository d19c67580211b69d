"""Forming: ranks that have left their old groups meet, get the experts that they lack, and serve one placement.

This is the one way in which ranks come together: at the start, after a loss, when one is drained or added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from placement.planfile import Plan
from placement.seats import plan_fetch
from workers.vitals import Holdings


class Ranks(Protocol):
    """How the service reaches the workers: one call on several ranks at once, the answers in the order of the calls.

    Raises MigrationError when a rank fails or can't be reached.
    """

    def call(self, method: str, arguments: Iterable[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        """arguments: (rank, the method's arguments) for each rank to call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks meet: the host that rank 0 listens on ('auto' for the address of its node), gloo's interface, and
    the bytes/s at which a rank reads the checkpoint (0 where a peer is always nearer)."""

    host: str
    interface: str
    checkpoint_bandwidth: float = 0.0


def form(ranks: Ranks, plan: Plan, held: Sequence[Holdings], meeting: Meeting) -> tuple[int, int]:
    """Have ranks that have left serve plan. Returns how many experts came from peers and from the checkpoint.

    held: what each brings along. Raises MigrationError, and the ranks that got through serve nothing.
    """
    placement = plan.placement
    everyone = range(placement.num_ranks)
    fetch = plan_fetch(
        placement,
        [holdings.experts for holdings in held],
        plan.topology,
        checkpoint_bandwidth=meeting.checkpoint_bandwidth,
    )
    (rendezvous,) = ranks.call(
        "open_rendezvous", [(0, (meeting.host, meeting.interface, placement.epoch, placement.num_ranks))]
    )
    ranks.call("take_seat", [(rank, (rendezvous, rank, placement.num_ranks)) for rank in everyone])
    ranks.call("release_except", [(rank, (fetch.keep[rank],)) for rank in everyone])
    for moves in fetch.rounds:
        busy = sorted({rank for move in moves for rank in (move.source.rank, move.target.rank)})
        ranks.call("copy_round", [(rank, (placement.epoch, moves)) for rank in busy])
    restoring = [(rank, (experts,)) for rank, experts in enumerate(fetch.restore) if experts]
    ranks.call("restore", restoring)
    ranks.call("serve", [(rank, (placement, plan.topology, rank)) for rank in everyone])
    return sum(map(len, fetch.rounds)), sum(map(len, fetch.restore))


def room(held: Sequence[Holdings], num_layers: int) -> int:
    """The rows a layer for which every rank's host slab has room."""
    return min(holdings.capacity for holdings in held) // num_layers
