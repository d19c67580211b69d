"""`moetis scale`: ask a running cluster for other seats, and wait until they are taken."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cluster.answers import answer
from cluster.config import ClusterConfig
from cluster.joining import joined_service
from placement.errors import ConfigError, MoetisError
from placement.topology import load_topology

POLL_S = 0.2


def run_scale(config: ClusterConfig, *, add: Iterable[int], drain: Iterable[int], timeout_s: float) -> tuple[int, ...]:
    """Drain and add seats; returns those that are taken in the end.

    Raises ConfigError for seats that do not exist or would leave none, MoetisError where it takes too long.
    """
    num_seats = load_topology(config.topology).num_ranks
    add, drain = set(add), set(drain)
    wrong = sorted(seat for seat in add | drain if not 0 <= seat < num_seats)
    if wrong or add & drain or not add | drain:
        raise ConfigError(
            f"--add {sorted(add)} --drain {sorted(drain)}: name seats from 0 to {num_seats - 1}, each once"
        )
    with joined_service(config) as service:
        wanted = set(answer(service.wanted.remote())) or set(range(num_seats))
        wanted = (wanted | add) - drain
        if not wanted:
            raise ConfigError(f"--drain {sorted(drain)}: no seat would be left")
        answer(service.want.remote(tuple(sorted(wanted))))
        deadline = time.monotonic() + timeout_s
        while True:
            seats = tuple(member.seat for member in answer(service.members.remote()))
            if set(seats) == wanted:
                return seats
            if time.monotonic() > deadline:
                raise MoetisError(
                    f"seats {sorted(wanted)} are asked for, but after {timeout_s:.0f} s {list(seats)} are taken; "
                    f"what serves says why"
                )
            time.sleep(POLL_S)
