"""Before a rank says that it serves: kernels touched, hot experts in slots, and the crossover measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from placement.baselines import linear_placement
from placement.core import ExpertId, Tier
from placement.tiers import hottest_first
from placement.topology import load_topology
from workers.crossover import SIZES, choose_crossover
from workers.options import RecorderOptions, WorkerOptions
from workers.worker import ExpertWorker

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"


def test_hot_experts_come_first_and_layers_take_turns() -> None:
    placement = linear_placement(2, 4, 2, 2)
    tiers = np.full((2, 4), Tier.WARM, np.uint8)
    tiers[1, 3] = Tier.HOT
    order = hottest_first(replace(placement, tiers=tiers), 1)
    assert order == [ExpertId(1, 3), ExpertId(0, 2), ExpertId(1, 2), ExpertId(0, 3)]


def test_layers_stream_from_where_it_is_hardly_slower() -> None:
    sizes = [24, 32, 48, 64]
    assert choose_crossover(sizes, [1, 1, 1, 1], [1.2, 1.1, 1.04, 0.9]) == 48
    assert choose_crossover(sizes, [1, 1, 1, 1], [0.9, 1.2, 1.0, 1.0]) == 48
    assert choose_crossover(sizes, [1, 1, 1, 1], [2, 2, 2, 2]) == 65
    assert choose_crossover(sizes, [1, 1, 1, 1], [1, 1, 1, 1]) == 24


def test_a_rank_that_serves_has_its_hot_experts_in_slots_and_knows_its_crossover() -> None:
    placement = linear_placement(8, 32, 1, 32)
    tiers = np.full((8, 32), Tier.WARM, np.uint8)
    tiers[5] = Tier.HOT
    placement = replace(placement, tiers=tiers)
    options = WorkerOptions(model=MODEL, recorder=RecorderOptions(folder=None), kv_pages=8, cache_share=0.2)
    worker = ExpertWorker(options, rank=0, topology=load_topology("1x1"), placement=placement)
    worker.join(worker.open_rendezvous(host="127.0.0.1", interface="lo"))
    cache = worker._parallel.cache
    counters = worker.status().cache
    worker.stop()
    assert cache.resident(5) == set(range(32))
    assert len(cache.resident(0)) in (2, 3)
    assert (counters["lookups"], counters["copies"]) == (0, cache.num_slots)
    assert counters["stream_from"] in (*SIZES, 33)
