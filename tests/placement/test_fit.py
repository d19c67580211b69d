from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.fit import amount_of
from placement.errors import ConfigError
from placement.fit.checkpoint import read_checkpoint
from placement.fit.sizing import FitRequest, expert_sizes, fit_model, kv_bytes_per_request, union_of_experts

CONFIG = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}
ONE = np.zeros((32, 64), np.float16)


def _folder(path: Path, *, leave_out: str = "", fused: bool = False) -> Path:
    tensors = {"model.embed_tokens.weight": np.zeros((100, 64), np.float16)}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        if fused:
            tensors[f"{stem}.gate_up_proj"] = np.zeros((4, 64, 64), np.float16)
            tensors[f"{stem}.down_proj"] = np.zeros((4, 64, 32), np.float16)
        else:
            for expert in range(4):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    tensors[f"{stem}.{expert}.{name}.weight"] = ONE
    tensors = {name: value for name, value in tensors.items() if name != leave_out}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def _request(gpu_bytes: float) -> FitRequest:
    return FitRequest(gpu_bytes=gpu_bytes, context=1000, batch=1, link_bandwidth=1e9, hbm_bandwidth=1e12)


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_counted_apart_from_what_stays_on_the_gpu(tmp_path: Path, fused: bool) -> None:
    model = read_checkpoint(_folder(tmp_path, fused=fused))
    assert (model.layers, model.all_experts, model.expert_bytes) == ((0, 1), 8, 3 * ONE.nbytes)
    assert model.resident_bytes == 100 * 64 * 2


def test_more_memory_gives_slots_up_to_all_experts(tmp_path: Path) -> None:
    model = read_checkpoint(_folder(tmp_path))
    fit = fit_model(model, _request(1e12), tmp_path)
    assert [row.share for row in fit.precisions] == [1.0, 1.0, 1.0]
    tight = fit.gpu_bytes - fit.left_bytes + 3 * model.expert_bytes
    assert fit_model(model, _request(tight), tmp_path).precisions[0].slots == 3


def test_int8_is_half_and_int4_a_quarter_of_16_bits(tmp_path: Path) -> None:
    sizes = expert_sizes(read_checkpoint(_folder(tmp_path)))
    assert 0.5 < sizes["int8"] / sizes["stored"] < 0.55
    assert 0.25 < sizes["int4"] / sizes["stored"] < 0.29


def test_what_cannot_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    model = read_checkpoint(_folder(tmp_path))
    with pytest.raises(ConfigError, match=r"GiB KV cache \(1 x 1000 tokens\) .* > 0\.0 GiB"):
        fit_model(model, _request(1e6), tmp_path)


def test_the_bound_at_one_token_is_the_link_over_the_bytes_missed(tmp_path: Path) -> None:
    model = read_checkpoint(_folder(tmp_path))
    row = fit_model(model, _request(1e12), tmp_path).precisions[0]
    assert row.tokens_per_s["0.50"] == pytest.approx(1e9 / (2 * 2 * model.expert_bytes * 0.5))


def test_kv_cache_of_grouped_latent_and_sliding_attention() -> None:
    here = Path()
    assert kv_bytes_per_request(CONFIG, 10, here) == 2 * 2 * 2 * 16 * 2 * 10
    sliding = CONFIG | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    assert kv_bytes_per_request(sliding, 10, here) == 2 * 2 * 2 * 16 * 14
    latent = CONFIG | {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    assert kv_bytes_per_request(latent, 10, here) == 2 * 4 * 20 * 2 * 10


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    _folder(tmp_path, leave_out="model.layers.1.mlp.experts.2.up_proj.weight")
    with pytest.raises(ConfigError, match=r"layer 1, expert 2: tensor 'up_proj\.weight' is missing"):
        read_checkpoint(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    shard = _folder(tmp_path) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: truncated: tensor"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_no_shard_is_named(tmp_path: Path, content: bytes) -> None:
    (_folder(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
        read_checkpoint(tmp_path)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    save_file({"lm_head.weight": ONE}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match="no routed experts"):
        read_checkpoint(tmp_path)


def test_the_union_grows_towards_all_experts() -> None:
    assert union_of_experts(64, 8, 1) == pytest.approx(8)
    assert union_of_experts(64, 8, 1000) == pytest.approx(64)


def test_amounts_are_read_in_powers_of_1024() -> None:
    assert (amount_of("64K", "--context"), amount_of("1.5GiB", "--gpu-memory")) == (65536, 3 << 29)
    with pytest.raises(ConfigError, match="--context '-1'"):
        amount_of("-1", "--context")
