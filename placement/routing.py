"""HomeRouting: where a new request should run, one request at a time, before or after its routing is known.

The batch form over a trace is `homes.route_homes`; this is what a gateway asks as requests come in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.core import Placement
from placement.errors import ConfigError, TraceError
from placement.homes import home_value
from placement.topology import Topology
from placement.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What a home at each node saves a token of each id: float32 [V, N], in nodes visited per token and layer.

    Ids that were seen less than a few times lean towards the mean over all tokens.
    """

    value: NDArray[np.float32]

    def of_prompt(self, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """The mean over a prompt's ids: [N]. Ids beyond the table count as unknown; an empty prompt is all zero."""
        known = token_ids[(token_ids >= 0) & (token_ids < len(self.value))]
        if len(known) == 0:
            return np.zeros(self.value.shape[1])
        mean: NDArray[np.float64] = self.value[known].mean(axis=0, dtype=np.float64)
        return mean


FAITH = 4.0


def build_token_table(placement: Placement, topology: Topology, trace: RoutingTrace) -> TokenTable:
    """Count a table from a trace that carries token ids. Raises TraceError where it carries none."""
    if trace.token_id is None:
        raise TraceError("a table from token ids to nodes needs a trace with 'token_id'; this one carries none")
    owner = np.maximum(trace.token_id, 0).astype(np.int64)
    num_ids = int(owner.max()) + 1
    value = home_value(placement, topology.node_of_rank(), trace, owner, num_ids)
    seen = np.bincount(owner, minlength=num_ids)[:, None]
    mean = (value * seen).sum(axis=0) / seen.sum()
    leaning = (value * seen + FAITH * mean) / (seen + FAITH)
    return TokenTable(value=leaning.astype(np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeRouting:
    """The requests now at home on each rank [R], and the sessions that stay where they are. `choose` gives the next.

    slack: how far a node may be above its share of the requests; one request above is always allowed.
    """

    topology: Topology
    running: tuple[int, ...]
    sessions: dict[str, int]
    slack: float = 1.05

    def __post_init__(self) -> None:
        if len(self.running) != self.topology.num_ranks or min(self.running) < 0:
            raise ConfigError(f"'running' must be {self.topology.num_ranks} numbers from 0 up, got {self.running}")

    def choose(self, node_value: NDArray[np.float64], session: str | None = None) -> tuple[int, HomeRouting]:
        """The home rank of a new request and the routing afterwards.

        node_value [N]: what a home there saves, from `TokenTable.of_prompt` or from a request's first tokens
        (`homes.home_value`). A known session stays; else the node of most value with room, and its idlest rank.
        """
        rank = self.sessions.get(session) if session is not None else None
        if rank is None:
            rank = self._best_rank(node_value)
        running = tuple(count + (index == rank) for index, count in enumerate(self.running))
        sessions = self.sessions if session is None else self.sessions | {session: rank}
        return rank, replace(self, running=running, sessions=sessions)

    def _best_rank(self, node_value: NDArray[np.float64]) -> int:
        node_of_rank = self.topology.node_of_rank()
        running = np.array(self.running)
        at_node = np.bincount(node_of_rank, weights=running)
        share = np.bincount(node_of_rank) / len(running)
        limit = np.maximum((running.sum() + 1) * share * self.slack, np.floor(running.sum() * share) + 1)
        node = int(np.argmax(np.where(at_node + 1 <= limit, node_value, -np.inf)))
        inside = np.flatnonzero(node_of_rank == node)
        return int(inside[np.argmin(running[inside])])

    def finish(self, rank: int) -> HomeRouting:
        """The routing after a request on rank ended."""
        running = tuple(count - (index == rank) for index, count in enumerate(self.running))
        return replace(self, running=running)


def idle_routing(topology: Topology, slack: float = 1.05) -> HomeRouting:
    """A routing with nothing running yet."""
    return HomeRouting(topology=topology, running=(0,) * topology.num_ranks, sessions={}, slack=slack)
