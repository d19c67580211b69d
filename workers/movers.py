"""Which mover a rank has: over NCCL between GPUs, over gloo else."""

from __future__ import annotations

import torch

from workers.device_mover import DeviceMover
from workers.host_slab import HostSlab
from workers.mover import Mover
from workers.peers import Peers


def make_mover(
    slab: HostSlab,
    *,
    peers: Peers,
    blob_bytes: int,
    device: torch.device,
    timeout_s: float,
    max_bytes_per_s: float | None = None,
) -> Mover | DeviceMover:
    """The mover for a rank's device. To be made before the rank serves: on a GPU it takes its buffers at once."""
    if device.type == "cuda" and peers.num_ranks > 1:
        return DeviceMover(
            slab,
            group=peers.bulk,
            signals=peers.signals,
            rank=peers.rank,
            blob_bytes=blob_bytes,
            device=device,
            timeout_s=timeout_s,
            max_bytes_per_s=max_bytes_per_s,
        )
    return Mover(slab, group=peers.bulk, rank=peers.rank, blob_bytes=blob_bytes, max_bytes_per_s=max_bytes_per_s)
