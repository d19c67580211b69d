"""Which mover a rank has: over NCCL between GPUs, over gloo else."""

from __future__ import annotations

import torch

from workers.device_mover import DeviceMover
from workers.host_slab import HostSlab
from workers.mover import Mover
from workers.peers import Group


def make_mover(
    slab: HostSlab,
    *,
    group: Group,
    rank: int,
    blob_bytes: int,
    device: torch.device,
    timeout_s: float,
    max_bytes_per_s: float | None = None,
) -> Mover | DeviceMover:
    """The mover for a rank's device."""
    if device.type == "cuda":
        return DeviceMover(
            slab,
            group=group,
            rank=rank,
            blob_bytes=blob_bytes,
            device=device,
            timeout_s=timeout_s,
            max_bytes_per_s=max_bytes_per_s,
        )
    return Mover(slab, group=group, rank=rank, blob_bytes=blob_bytes, max_bytes_per_s=max_bytes_per_s)
