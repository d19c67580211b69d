"""A worker reads the experts that it owns from the checkpoint's files, and holds no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose

from placement.core import ExpertId
from placement.errors import ConfigError
from workers.expert_source import CheckpointExperts, ModuleExperts, keeps_experts_apart
from workers.loading import load_model, load_share
from workers.options import RecorderOptions, WorkerOptions
from workers.shards import open_shards

CPU = torch.device("cpu")
DEMO = Path(__file__).parents[2] / "configs" / "models" / "demo"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "olmoe": {},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": DEEPSEEK | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "granitemoe": {},
    "phimoe": {},
}


def _options(folder: Path, dtype: str = "auto") -> WorkerOptions:
    return WorkerOptions(model=folder, recorder=RecorderOptions(folder=None), dtype=dtype)


def _save(folder: Path, architecture: str, max_shard_size: str = "20KB") -> Path:
    config = AutoConfig.for_model(architecture, **(SMALL | ARCHITECTURES[architecture]))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_experts_and_all_else_are_those_of_the_whole_model(tmp_path: Path, architecture: str) -> None:
    options = _options(_save(tmp_path, architecture))
    whole = load_model(options, CPU)
    model, experts = load_share(options, CPU)
    plain = ModuleExperts(whole)
    assert isinstance(experts, CheckpointExperts)
    assert experts.layout == plain.layout
    one, other = (torch.zeros(plain.layout.num_bytes, dtype=torch.uint8) for _ in range(2))
    for layer in range(2 - ARCHITECTURES[architecture].get("first_k_dense_replace", 0)):
        for expert in range(4):
            experts.read(ExpertId(layer, expert), one)
            plain.read(ExpertId(layer, expert), other)
            assert torch.equal(one, other)
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        assert mine[name].numel() == 0 or torch.equal(mine[name], tensor), name
    dropped = [name for name, tensor in mine.items() if tensor.numel() == 0]
    assert dropped
    assert all("experts" in name for name in dropped)


def test_weights_come_in_the_workers_type(tmp_path: Path) -> None:
    model, experts = load_share(_options(_save(tmp_path, "qwen3_moe"), "bfloat16"), CPU)
    assert {field.dtype for field in experts.layout.fields} == {torch.bfloat16}
    assert model.dtype == torch.bfloat16


def test_the_demo_model_keeps_its_end_of_text() -> None:
    model, _ = load_share(_options(DEMO), CPU)
    whole = load_model(_options(DEMO), CPU)
    assert model.generation_config.eos_token_id == whole.generation_config.eos_token_id


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, "qwen3_moe", "1GB")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"model '{tmp_path}': cannot be loaded"):
        load_share(_options(tmp_path), CPU)


@pytest.mark.parametrize(
    ("operation", "apart"),
    [
        (MergeModulelist(dim=0), True),
        (MergeModulelist(dim=1), False),
        (Concatenate(dim=1), True),
        (Concatenate(dim=0), False),
        (Transpose(1, 2), True),
        (Transpose(0, 1), False),
        (Chunk(dim=0), False),
    ],
)
def test_conversions_that_mix_experts_are_told_from_those_that_do_not(operation: Any, apart: bool) -> None:
    assert keeps_experts_apart(operation) is apart


def test_a_folder_without_safetensors_has_none_to_read(tmp_path: Path) -> None:
    assert open_shards(tmp_path) is None


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "no readable 'weight_map'"),
        ("[]", "no readable 'weight_map'"),
        ('{"weight_map": 3}', "no readable 'weight_map'"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safetensors cannot be read"),
        ('{"weight_map": {"a": "../../x.safetensors"}}', "which is not in the folder"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, index: str, said: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=said):
        open_shards(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    _save(tmp_path, "qwen3_moe", "1GB")
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_share(_options(tmp_path), CPU)
