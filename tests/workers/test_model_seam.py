"""Any MoE architecture of Transformers, split over ranks, computes what the plain model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from placement.core import Placement
from placement.topology import load_topology
from tests.workers.ranks import meet, run_ranks
from workers import peers
from workers.options import RecorderOptions
from workers.parallel_model import ParallelModel
from workers.recorder import Recorder
from workers.step_clock import StepClock

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "mixtral": MixtralConfig(**COMMON, num_local_experts=6, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "olmoe": OlmoeConfig(**COMMON, num_experts=6, num_experts_per_tok=3),
    "deepseek_v3": DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4, "num_hidden_layers": 3},
        first_k_dense_replace=1,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": GptOssConfig(**COMMON, head_dim=8, num_local_experts=6, num_experts_per_tok=2),
}
# Two ranks and a third that holds copies: experts 0 and 3 have replicas, rank 2 has an empty row.
TABLE = [[0, 1, 2, 3, 4, 5, 0, 3, -1]]


def compare_with_the_plain_model(rank: int, mail: Any) -> dict[str, float]:
    """The largest difference of logits, by architecture. Batches are uneven, and the last rank has no tokens."""
    groups = meet(rank, mail)
    found = {name: _difference(rank, groups, name) for name in CONFIGS}
    groups.leave()
    return found


def _difference(rank: int, groups: peers.Peers, name: str) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Fresh biases are zero and would hide that they are ignored; tiny weights would hide nearly everything.
        torch.nn.init.normal_(parameter, std=0.3)
    torch.manual_seed(rank)
    ids = torch.randint(0, 64, (1 + rank, 7))
    expected = model(ids).logits
    num_layers = 2
    parallel = ParallelModel(
        model,
        placement=Placement(epoch=0, num_ranks=3, num_experts=6, physical_to_logical=TABLE * num_layers),
        topology=load_topology("3x1"),
        rank=rank,
        device=torch.device("cpu"),
        cache_share=0.5,
        host_slab_rows=1.0,
    )
    recorder = Recorder(
        RecorderOptions(folder=None), rank=rank, num_layers=num_layers, num_experts=6, top_k=2, model=name
    )
    parallel.attach(groups.data, recorder, StepClock())
    if rank == 2:
        parallel.join_step()
        return 0.0
    return float((model(ids).logits - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def differences() -> list[dict[str, float]]:
    return run_ranks(compare_with_the_plain_model, 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_over_three_ranks_are_those_of_the_plain_model(differences: list[dict[str, float]], name: str) -> None:
    assert max(found[name] for found in differences) < 1e-5


def test_the_experts_that_moved_out_leave_no_weights_behind() -> None:
    config = copy.deepcopy(CONFIGS["gpt_oss"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    before = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    parallel = ParallelModel(
        model,
        placement=Placement(epoch=0, num_ranks=1, num_experts=6, physical_to_logical=[list(range(6))] * 2),
        topology=load_topology("1x1"),
        rank=0,
        device=torch.device("cpu"),
        cache_share=0.5,
        host_slab_rows=1.0,
    )
    recorder = Recorder(RecorderOptions(folder=None), rank=0, num_layers=2, num_experts=6, top_k=2, model="")
    parallel.attach(None, recorder, StepClock())
    after = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    assert before > 0
    assert after == 0
