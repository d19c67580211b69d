from __future__ import annotations

import pytest

from cluster.devices import choose_device
from placement.errors import ConfigError


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (3, "cpu"), (4, "cuda"), (8, "cuda")])
def test_auto_takes_gpus_where_there_is_one_for_each_rank(num_gpus: float, device: str) -> None:
    assert choose_device("auto", num_ranks=4, num_gpus=num_gpus) == device


def test_cpu_stays_cpu_beside_gpus() -> None:
    assert choose_device("cpu", num_ranks=4, num_gpus=8) == "cpu"


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="4 ranks need a GPU each, the cluster has 2"):
        choose_device("cuda", num_ranks=4, num_gpus=2)
