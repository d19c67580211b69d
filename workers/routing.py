"""The routing table: the placement as a rank looks it up, and the epoch that it serves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.core import ExpertId, Placement
from placement.dispatch import choose_ranks
from placement.topology import Topology
from workers.traffic import TrafficCounters


class RoutingTable:
    """holds [L, R, E] uint16, a rank's weight where it holds an expert, of the epoch in force.

    It is switched as a whole at a step boundary.

    layers_done counts the exchanges that this rank has joined in the step under way, so that a rank whose own forward
    fails half-way can still join the rest.
    """

    def __init__(self, *, placement: Placement, topology: Topology, rank: int, top_k: int) -> None:
        self.top_k = top_k
        self.num_experts = placement.num_experts
        self.take_seat(rank, topology, placement)

    def take_seat(self, rank: int, topology: Topology, placement: Placement) -> None:
        """Be `rank` of a topology from now on, and serve a placement for it."""
        self.rank = rank
        # Read-only as in placement/precompile.py, since to numba that is another type: a topology that came over the
        # wire may be writable, and the first step would wait for the compiler.
        self.node_of_rank: NDArray[np.int32] = np.array(topology.node_of_rank(), np.int32)
        self.node_of_rank.setflags(write=False)
        self.layers_done = 0
        self.most_tokens = 0
        self.traffic = TrafficCounters()
        self.switch(placement, placement.weights_per_rank())

    def warm_up(self) -> None:
        """Have the choice of ranks compiled, or read from the cache: seconds that no step should wait for."""
        choose_ranks(
            np.zeros((0, self.top_k), np.int64), np.zeros(0, np.int32), np.array(self.holds[0]), self.node_of_rank
        )

    def switch(self, placement: Placement, holds: NDArray[np.uint16]) -> None:
        """Serve another placement from the next step on. holds: its `weights_per_rank`."""
        self.placement = placement
        self.epoch = placement.epoch
        self.holds = holds

    def serves(self, expert: ExpertId) -> bool:
        """Whether the placement gives this rank an expert."""
        return bool(self.holds[expert.layer, self.rank, expert.expert])

    def expect(self, most_tokens: int) -> None:
        """The ranks have agreed that none of them has more tokens in the next step; 0: they have not."""
        self.most_tokens = most_tokens

    def begin_step(self) -> None:
        self.layers_done = 0

    def count_layer(self) -> None:
        self.layers_done += 1
