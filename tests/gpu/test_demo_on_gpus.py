"""The demo on Ray, a GPU a worker: served, learnt from, moved live over NCCL, every text checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.demo_run import DEMO_PROMPTS, demo_config, run_demo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

EXPERTS = 32


def test_texts_on_gpus_under_ray_are_the_plain_models_while_experts_move(tmp_path: Path) -> None:
    config = demo_config(tmp_path / "run")
    ranks = torch.cuda.device_count()
    workers = config.workers.model_copy(update={"device": "cuda", "dtype": "float32", "cache_share": 0.5})
    # Each GPU is a node to the planner, so that there is something to gain from moves.
    here = {"topology": f"{ranks}x1", "slots_per_rank": EXPERTS // ranks + 4, "workers": workers}
    result = run_demo(config.model_copy(update=here), DEMO_PROMPTS, num_prompts=24, max_new_tokens=24)
    assert result.verdict.wrong == ()
    assert result.verdict.tokens > 24 * 20
    assert result.rebalance.decision == "applied"
