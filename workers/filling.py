"""Filling a host slab that is smaller than what the rank owns: the hottest into memory, the others left on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from placement.core import ExpertId, Placement
from placement.errors import ConfigError
from workers.disk_tier import BlobFile, DiskTier
from workers.expert_source import ExpertSource
from workers.tiered_slab import LEAST_ROWS, TieredSlab


def tiers_on(placement: Placement, rank: int) -> dict[ExpertId, int]:
    """The tier of each expert that a placement gives a rank."""
    columns = slice(rank * placement.rows_per_rank, (rank + 1) * placement.rows_per_rank)
    table, tiers = placement.physical_to_logical[:, columns], placement.tiers[:, columns]
    return {
        ExpertId(int(layer), int(table[layer, row])): int(tiers[layer, row])
        for layer, row in zip(*np.nonzero(table >= 0), strict=True)
    }


def fill_tiered(
    experts: ExpertSource,
    placement: Placement,
    *,
    rank: int,
    capacity: int,
    budget_bytes: int,
    disk_path: Path | None,
    pin: bool,
) -> TieredSlab:
    """A slab of budget_bytes, for a rank that may own capacity experts. Raises ConfigError where that can't be."""
    size = experts.layout.num_bytes
    rows = budget_bytes // size
    if rows < LEAST_ROWS:
        raise ConfigError(
            f"workers.host_slab_gb: {budget_bytes / 1e9:.3f} GB hold {rows} experts of {size / 1e6:.2f} MB; at least "
            f"{LEAST_ROWS} are needed, which is {LEAST_ROWS * size / 1e9:.3f} GB"
        )
    if not experts.lasts and disk_path is None:
        raise ConfigError(
            "workers.host_slab_gb: this checkpoint's experts can't be read one by one, so that those for which "
            "there is no room need a file: set workers.disk_path to a folder"
        )
    file = None if disk_path is None else BlobFile(disk_path, size)
    disk = DiskTier(source=experts if experts.lasts else None, file=file)
    slab = TieredSlab(rows=rows, capacity=capacity, blob_bytes=size, disk=disk, pin=pin)
    tiers = tiers_on(placement, rank)
    # Of equal tier, some of every layer.
    order = sorted(tiers, key=lambda expert: (tiers[expert], expert.expert, expert.layer))
    for expert in order[:rows]:
        experts.read(expert, slab.claim(expert))
        slab.publish(expert)
    scratch = torch.zeros(size, dtype=torch.uint8)
    for expert in order[rows:]:
        if file is not None:
            experts.read(expert, scratch)
            disk.keep(expert, scratch)
        slab.add_away(expert)
    slab.regard(tiers)
    return slab
