"""Which rank a request of the gateway goes to: HomeRouting with what is known so far, sessions bounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.routing import TokenTable, idle_routing
from placement.topology import Topology

MOST_SESSIONS = 10_000
# A session stays unless its rank has this many requests above the mean: stickiness must not make a hot spot.
SESSION_SLACK = 8


class Homes:
    """Chooses homes and keeps count. Until a token table is learned, homes are the idlest ranks."""

    def __init__(self, topology: Topology) -> None:
        self._routing = idle_routing(topology)
        self._table: TokenTable | None = None

    def learn(self, table: TokenTable) -> None:
        """Use what a trace says of token ids from now on; a table of other nodes, while some are gone, says nothing."""
        fits = table.value.shape[1] == self._routing.topology.num_nodes
        self._table = table if fits else None

    def choose(self, prompt: tuple[int, ...], session: str | None) -> int:
        """The home of a new request; tell `finish` when it has ended."""
        routing = self._routing
        if session is not None and self._overloaded(routing.sessions.get(session)):
            kept = {name: rank for name, rank in routing.sessions.items() if name != session}
            routing = replace(routing, sessions=kept)
        if self._table is None:
            value = np.zeros(routing.topology.num_nodes)
        else:
            value = self._table.of_prompt(np.array(prompt, np.int32))
        rank, routing = routing.choose(value, session)
        if len(routing.sessions) > MOST_SESSIONS:
            newest = list(routing.sessions.items())[-MOST_SESSIONS // 2 :]
            routing = replace(routing, sessions=dict(newest))
        self._routing = routing
        return rank

    def finish(self, rank: int) -> None:
        self._routing = self._routing.finish(rank)

    @property
    def running(self) -> tuple[int, ...]:
        return self._routing.running

    def _overloaded(self, rank: int | None) -> bool:
        running = self._routing.running
        return rank is not None and running[rank] > sum(running) / len(running) + SESSION_SLACK
