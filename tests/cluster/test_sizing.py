"""`slots: auto`: the slots that memory leaves room for, and a refusal with the sum where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig, config_from_dict
from cluster.sizing import sized_options
from placement.errors import ConfigError
from placement.fit.checkpoint import read_checkpoint
from placement.fit.precision import Precision
from placement.fit.serving import ServingRequest, fit_for_serving
from placement.topology import load_topology
from workers.options import WorkerOptions

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
TOPOLOGY = load_topology("2x2")
ROWS, BLOB = 8 * 10, 3 * 128 * 64 * 4


def _config(**workers: Any) -> ClusterConfig:
    return config_from_dict(
        {
            "model": str(MODEL),
            "topology": "2x2",
            "slots_per_rank": 10,
            "run_dir": "runs/never",
            "workers": {"slots": "auto"} | workers,
        },
        source="test",
    )


def _slots(options: WorkerOptions) -> int:
    return -(-int(options.cache_share * ROWS * 1000) // 1000)


def test_slots_are_what_memory_leaves_beside_model_kv_cache_and_workspace() -> None:
    notes: list[str] = []
    options = sized_options(_config(memory_gb=0.082), TOPOLOGY, "cpu", notes.append)
    page = 32 * 8 * 2 * 2 * 32 * 4
    assert options.memory_bytes == 82e6
    assert f"{512 * page / 2**20:.1f} MiB KV cache" in notes[0]
    fewer_pages = sized_options(_config(memory_gb=0.082, kv_pages=510), TOPOLOGY, "cpu", notes.append)
    assert 0 < _slots(options) < _slots(fewer_pages) < ROWS
    assert _slots(fewer_pages) - _slots(options) in (2 * page // BLOB, 2 * page // BLOB + 1)


def test_all_experts_get_a_slot_where_there_is_room_and_no_more() -> None:
    options = sized_options(_config(memory_gb=8.0), TOPOLOGY, "cpu", lambda text: None)
    assert _slots(options) == ROWS
    assert sized_options(_config(), TOPOLOGY, "cuda", lambda text: None).cache_share <= 1


def test_what_cannot_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"does not fit: .* model .* KV cache .* are missing for one; lower workers"):
        sized_options(_config(memory_gb=0.001), TOPOLOGY, "cpu", lambda text: None)


def test_on_cpus_it_must_be_said_how_much_memory_there_is() -> None:
    with pytest.raises(ConfigError, match=r"say with workers.memory_gb"):
        sized_options(_config(), TOPOLOGY, "cpu", lambda text: None)


def test_fewer_slots_than_a_token_needs_are_a_warning() -> None:
    notes: list[str] = []
    for tenth in range(750, 900):
        try:
            options = sized_options(_config(memory_gb=tenth / 1e4), TOPOLOGY, "cpu", notes.append)
        except ConfigError:
            continue
        break
    assert _slots(options) < 4
    assert "several waves" in notes[-1]


def test_a_share_that_is_given_is_taken_as_it_is() -> None:
    options = sized_options(_config(cache_share=0.25, slots=None), TOPOLOGY, "cpu", lambda text: None)
    assert (options.cache_share, options.memory_bytes) == (0.25, None)


def test_a_kv_cache_can_go_to_host_memory_from_a_gpu_alone() -> None:
    config = _config(memory_gb=8.0, kv_offload_gb=2.0)
    with pytest.raises(ConfigError, match=r"workers.kv_offload_gb is 2.0, but the workers' device is 'cpu'"):
        sized_options(config, TOPOLOGY, "cpu", lambda text: None)
    assert sized_options(config, TOPOLOGY, "cuda", lambda text: None).kv_offload_gb == 2.0


def test_on_a_gpu_the_attention_mask_of_a_long_context_is_counted() -> None:
    def workspace(kv_tokens: int) -> int:
        request = ServingRequest(
            memory_bytes=8e9,
            kv_tokens=kv_tokens,
            max_batch_tokens=256,
            max_requests=64,
            rows=ROWS,
            precision=Precision.STORED,
            element_bytes=2,
            on_gpu=True,
            ranks=1,
            machines=1,
        )
        return fit_for_serving(read_checkpoint(MODEL), request, MODEL).workspace_bytes

    assert workspace(65_536) - workspace(16_384) == 256 * (65_536 - 16_384) * 2
