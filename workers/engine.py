"""The engine of one founding: a lockstep manager for a model and the groups that it steps in."""

from __future__ import annotations

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from placement.fit.sizing import GIB
from workers.events import EventRouter
from workers.group import Group
from workers.lockstep import LockstepManager, StepHooks
from workers.options import WorkerOptions


def start_engine(
    model: PreTrainedModel, options: WorkerOptions, *, control: Group, hooks: StepHooks, router: EventRouter
) -> LockstepManager:
    """A manager with a KV cache of its own, whose thread steps with the other ranks of control from now on."""
    generation = GenerationConfig.from_model_config(model.config)
    generation.update(do_sample=False, max_new_tokens=1, eos_token_id=model.generation_config.eos_token_id)
    batching = ContinuousBatchingConfig(
        page_size=options.kv_page_size,
        num_blocks=options.kv_pages,
        cpu_offload_space=options.kv_offload_gb * 1e9 / GIB,
        max_batch_tokens=options.max_batch_tokens,
        max_requests_per_batch=options.max_requests,
        use_async_batching=False,
        use_cuda_graph=False,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    manager = LockstepManager(model, generation, batching, control=control, hooks=hooks, router=router)
    with torch.no_grad():
        manager.start()
    return manager
