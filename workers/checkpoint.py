"""Single experts from the checkpoint: where they come from when every rank that held them is gone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from placement.core import ExpertId
from workers.expert_source import ExpertSource
from workers.host_slab import HostSlab
from workers.loading import load_share
from workers.options import WorkerOptions


def restore_experts(
    options: WorkerOptions, slab: HostSlab, experts: Iterable[ExpertId], source: ExpertSource | None
) -> int:
    """Read experts into the slab, those that are there already left out. Returns how many bytes.

    source: where they can be read one by one; None where they can't, and the checkpoint is loaded whole for it. Raises
    ConfigError where it can't be read, MigrationError where the slab has no room.
    """
    missing = sorted(set(experts) - slab.experts())
    if not missing:
        return 0
    if source is None:
        _, source = load_share(options, torch.device("cpu"))
    for expert in missing:
        source.read(expert, slab.claim(expert))
        slab.publish(expert)
    return len(missing) * source.layout.num_bytes
