"""Every engine's file, checked by that engine's own rules (shared/FORMATS.md)."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from placement.baselines import eplb_placement, random_placement
from placement.core import EMPTY, Placement
from placement.errors import PlacementError
from placement.interchange.export import Engine, check_ranks, export_placement, fill_empty
from placement.layers import ModelLayers, all_moe

PLACEMENT = random_placement(3, 8, 4, 3)
LAYERS = ModelLayers(moe=(1, 2, 3), num_hidden=5)


def _with_empty() -> Placement:
    table = np.array([[0, 1, EMPTY, 2, 3, 0]], np.int32)
    return Placement(epoch=0, num_ranks=2, num_experts=4, physical_to_logical=table)


def test_sglang_gets_one_key_and_a_row_for_every_hidden_layer() -> None:
    found = json.loads(export_placement(PLACEMENT, LAYERS, Engine.SGLANG))
    assert set(found) == {"physical_to_logical_map"}
    rows = found["physical_to_logical_map"]
    assert rows[1:4] == PLACEMENT.physical_to_logical.tolist()
    assert rows[0] == rows[4] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


def test_tensorrt_llm_gets_exactly_its_three_keys_and_absolute_layers() -> None:
    text = export_placement(PLACEMENT, LAYERS, Engine.TENSORRT).decode()
    found = yaml.safe_load(text)
    assert found == {
        "num_slots": 12,
        "initial_global_assignments": dict(zip((1, 2, 3), PLACEMENT.physical_to_logical.tolist(), strict=True)),
        "layer_updates_per_iter": 0,
    }
    assert list(found) == ["num_slots", "initial_global_assignments", "layer_updates_per_iter"]


def test_ascend_gets_its_devices_of_every_moe_layer() -> None:
    found = json.loads(export_placement(PLACEMENT, LAYERS, Engine.ASCEND))
    assert found["moe_layer_count"] == 3
    assert [layer["layer_id"] for layer in found["layer_list"]] == [0, 1, 2]
    for layer, row in zip(found["layer_list"], PLACEMENT.physical_to_logical, strict=True):
        assert set(layer) == {"layer_id", "device_count", "device_list"}
        assert layer["device_count"] == 4
        assert [device["device_id"] for device in layer["device_list"]] == [0, 1, 2, 3]
        assert [e for device in layer["device_list"] for e in device["device_expert"]] == row.tolist()


def test_what_is_written_is_the_same_to_the_byte_each_time() -> None:
    table = np.array([[0, 1, 1, 0]], np.int32)
    small = Placement(epoch=0, num_ranks=2, num_experts=2, physical_to_logical=table)
    layers = ModelLayers(moe=(1,), num_hidden=2)
    assert export_placement(small, layers, Engine.SGLANG) == (
        b'{"physical_to_logical_map": [[0, 1, 0, 1], [0, 1, 1, 0]]}\n'
    )
    assert export_placement(small, layers, Engine.TENSORRT) == (
        b"num_slots: 4\ninitial_global_assignments:\n  1: [0, 1, 1, 0]\nlayer_updates_per_iter: 0\n"
    )
    assert export_placement(small, layers, Engine.ASCEND) == (
        b'{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list": '
        b'[{"device_id": 0, "device_expert": [0, 1]}, {"device_id": 1, "device_expert": [1, 0]}]}]}\n'
    )


def test_vllm_gets_what_its_policy_would_return_empty_slots_and_all() -> None:
    table = np.load(io.BytesIO(export_placement(_with_empty(), all_moe(1), Engine.VLLM)), allow_pickle=False)
    assert table.dtype == np.int64
    assert table.tolist() == [[0, 1, -1, 2, 3, 0]]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 5), st.integers(0, 99))
def test_eplbs_three_arrays_agree(layers: int, ranks: int, rows: int, spare: int, seed: int) -> None:
    experts = max(rows, ranks * rows - spare)
    made = random_placement(layers, experts, ranks, -(-experts // ranks), seed)
    arrays = np.load(io.BytesIO(export_placement(made, all_moe(layers), Engine.EPLB)), allow_pickle=False)
    phy2log, log2phy, logcnt = (arrays[name] for name in ("phy2log", "log2phy", "logcnt"))
    assert {phy2log.dtype, log2phy.dtype, logcnt.dtype} == {np.dtype(np.int64)}
    assert log2phy.shape == (layers, experts, logcnt.max())
    for layer in range(layers):
        for expert in range(experts):
            slots = np.flatnonzero(phy2log[layer] == expert).tolist()
            assert log2phy[layer, expert].tolist() == slots + [-1] * (int(logcnt.max()) - len(slots))
            assert logcnt[layer, expert] == len(slots)


@given(st.integers(1, 6), st.integers(2, 5), st.integers(2, 8), st.integers(0, 50))
def test_filling_empty_slots_puts_no_expert_twice_on_a_rank(layers: int, ranks: int, rows: int, seed: int) -> None:
    load = np.random.default_rng(seed).random((layers, rows + 1)) ** 9
    made = eplb_placement(load, ranks, rows)
    filled = fill_empty(made)
    Placement(epoch=0, num_ranks=ranks, num_experts=rows + 1, physical_to_logical=filled)
    assert filled.min() >= 0
    kept = made.physical_to_logical != EMPTY
    assert (filled[kept] == made.physical_to_logical[kept]).all()


def test_slots_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(PlacementError, match=re.escape("do not divide by 5 ranks; the nearest that do: 10 and 15")):
        check_ranks(PLACEMENT, 5)
    with pytest.raises(PlacementError, match=r"plan is for 4 ranks, the engine has 6.*--slots-per-rank 2"):
        check_ranks(PLACEMENT, 6)
    check_ranks(PLACEMENT, 4)


def test_layers_that_are_not_the_plans_are_refused() -> None:
    with pytest.raises(PlacementError, match="has 3 layers, but 2 MoE layers are named"):
        export_placement(PLACEMENT, all_moe(2), Engine.SGLANG)
