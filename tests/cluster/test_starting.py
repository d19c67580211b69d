from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import history as states
from cluster.config import ClusterConfig, config_from_dict
from cluster.history import History
from cluster.starting import history_path, starting_plan
from placement.baselines import random_placement
from placement.errors import ConfigError
from placement.planfile import Plan, plan_to_json
from placement.topology import load_topology
from tests.cluster.running_cli import write_trace

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
TOPOLOGY = load_topology("2x2")


def _config(folder: Path, **more: Any) -> ClusterConfig:
    raw = {"model": str(MODEL), "topology": "2x2", "slots_per_rank": 10, "run_dir": str(folder)}
    return config_from_dict(raw | more, source="test")


def _start(config: ClusterConfig) -> Plan:
    return starting_plan(config, load_topology(config.topology), History(history_path(config)))


def _plan(epoch: int, num_layers: int = 8) -> Plan:
    placement = random_placement(num_layers, 32, 4, 10, seed=3).with_epoch(epoch)
    return Plan(placement=placement, topology=TOPOLOGY, measured={})


def test_a_new_cluster_starts_with_every_expert_in_id_order(tmp_path: Path) -> None:
    placement = _start(_config(tmp_path)).placement
    assert placement.epoch == 0
    assert placement.physical_to_logical[0, :10].tolist() == list(range(10))


def test_a_cluster_that_comes_back_serves_the_epoch_that_served_last(tmp_path: Path) -> None:
    history = History(history_path(_config(tmp_path)))
    history.add(_plan(4), states.DONE)
    history.add(_plan(5), states.ABORTED)
    start = _start(_config(tmp_path))
    assert start.placement.epoch == 4
    assert (start.placement.physical_to_logical == _plan(4).placement.physical_to_logical).all()


def test_after_a_change_of_slots_the_history_goes_on_with_a_new_epoch(tmp_path: Path) -> None:
    History(history_path(_config(tmp_path))).add(_plan(4), states.DONE)
    placement = _start(_config(tmp_path, slots_per_rank=12)).placement
    assert (placement.epoch, placement.rows_per_rank) == (5, 12)


def test_the_plan_that_the_configuration_names_goes_first(tmp_path: Path) -> None:
    History(history_path(_config(tmp_path))).add(_plan(4), states.DONE)
    (tmp_path / "p.json").write_text(plan_to_json(_plan(0)))
    assert _start(_config(tmp_path, initial_plan=str(tmp_path / "p.json"))).placement.epoch == 5


def test_a_plan_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(plan_to_json(_plan(0, num_layers=3)))
    with pytest.raises(ConfigError, match=r"it is for 3 MoE layers \(not 8\)"):
        _start(_config(tmp_path, initial_plan=str(tmp_path / "p.json")))


def test_too_few_slots_for_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 8 slots per rank"):
        _start(_config(tmp_path, slots_per_rank=7))


def test_a_history_that_is_none_is_named(tmp_path: Path) -> None:
    history_path(_config(tmp_path)).write_text("this is no database, and longer than a header of a hundred bytes" * 3)
    with pytest.raises(ConfigError, match=r"history\.sqlite': .*move it away"):
        _start(_config(tmp_path))


def test_a_cold_start_plans_from_a_trace_until_there_is_a_history(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.npz", layers=8, experts=32)
    config = _config(tmp_path, initial_trace=str(trace))
    first = _start(config)
    assert first.measured["after"]["nodes_visited"] < first.measured["before"]["nodes_visited"]
    History(history_path(config)).add(_plan(4), states.DONE)
    assert _start(config).placement.epoch == 4


def test_a_cold_start_plans_from_counts_of_another_engine(tmp_path: Path) -> None:
    np.savez(tmp_path / "counts.npz", counts=np.random.default_rng(0).integers(1, 900, (8, 32)))
    first = _start(_config(tmp_path, initial_trace=str(tmp_path / "counts.npz")))
    assert first.measured["after"]["load_max_over_mean"] < first.measured["before"]["load_max_over_mean"]


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.npz")
    with pytest.raises(ConfigError, match=r"it has 2 MoE layers x 8 experts, '.*' 8 x 32"):
        _start(_config(tmp_path, initial_trace=str(trace)))
