"""Which mover a rank has for a round: through host memory on its own machine, over NCCL to the GPU of another one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from placement.migration import Move
from workers.device_mover import DeviceMover
from workers.host_slab import HostSlab
from workers.mover import Mover
from workers.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Movers:
    """far: to ranks of other machines. A round gives each rank one peer at most.

    Rounds take turns: one of an epoch that was given up may still wait for its peer when the next one begins.
    """

    peers: Peers
    near: Mover
    far: Mover | DeviceMover
    turn: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def copy_round(self, epoch: int, moves: Sequence[Move]) -> int:
        """As `Mover.copy_round`."""
        own = self.peers.rank
        pairs = [{move.source.rank, move.target.rank} for move in moves]
        is_near = all(self.peers.is_near(rank) for pair in pairs if own in pair for rank in pair)
        with self.turn:
            return (self.near if is_near else self.far).copy_round(epoch, moves)


def make_movers(
    slab: HostSlab,
    *,
    peers: Peers,
    blob_bytes: int,
    device: torch.device,
    timeout_s: float,
    max_bytes_per_s: float | None = None,
) -> Movers:
    """The movers for a rank's device. To be made before the rank serves: on a GPU, with ranks on several machines,
    they take buffers at once."""
    near = Mover(slab, group=peers.signals, rank=peers.rank, blob_bytes=blob_bytes, max_bytes_per_s=max_bytes_per_s)
    if device.type != "cuda" or len(set(peers.machines)) == 1:
        return Movers(peers=peers, near=near, far=near)
    far = DeviceMover(
        slab,
        group=peers.bulk,
        signals=peers.signals,
        rank=peers.rank,
        blob_bytes=blob_bytes,
        device=device,
        timeout_s=timeout_s,
        max_bytes_per_s=max_bytes_per_s,
    )
    return Movers(peers=peers, near=near, far=far)
