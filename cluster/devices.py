"""Which device the ranks run on: all on GPUs, one each, or all on CPUs."""

from __future__ import annotations

from placement.errors import ConfigError


def choose_device(wanted: str, *, num_ranks: int, num_gpus: float) -> str:
    """'cuda' or 'cpu' for every rank. 'auto' takes GPUs where the cluster has one for each rank.

    Raises ConfigError where GPUs are asked for and there are too few.
    """
    if wanted == "cuda" and num_gpus < num_ranks:
        raise ConfigError(f"workers.device is 'cuda': {num_ranks} ranks need a GPU each, the cluster has {num_gpus:g}")
    if wanted == "auto":
        return "cuda" if num_gpus >= num_ranks else "cpu"
    return wanted
