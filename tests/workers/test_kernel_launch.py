"""Kernels that are launched under a key: what is alike by the key is alike for Triton. Needs Triton, but no GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from placement.fit.precision import Precision
from tests.workers.test_model_seam import CONFIGS
from workers.blob import layout_of
from workers.few_tokens import NO_WORDS
from workers.kernel_launch import Launcher, aligned
from workers.seam import experts_modules

HIDDEN = 32


def _strided(size: tuple[int, int], stride: tuple[int, int], offset: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(offset + 4096, dtype=dtype).as_strided(size, stride, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", Precision)
def test_arguments_with_one_key_are_the_same_to_triton(
    precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from workers import fused_kernel

    if not isinstance(fused_kernel._gate_up, JITFunction):
        pytest.skip("another test has these kernels interpreted")
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    seen: dict[tuple[int, Any], str] = {}

    def launch(self: Launcher, grid: tuple[int, int, int], key: Any, *arguments: Any) -> None:
        kernel = self._kernel
        _, special, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(*arguments)
        if key is not None:
            assert seen.setdefault((id(self), key), str(special)) == str(special)

    monkeypatch.setattr(Launcher, "__call__", launch)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"], dtype=dtype)
    layout = layout_of(experts_modules(model)[0], 6, precision)
    fused = fused_kernel.FusedExperts(layout, torch.zeros((5, layout.num_bytes), dtype=torch.uint8))
    pick = random.Random(0).choice
    for _ in range(300):
        tokens, top_k = pick([0, 1, 2, 5, 16]), pick([1, 2, 3, 8])
        fused(
            _strided((tokens, HIDDEN), pick([(32, 1), (40, 1), (48, 1), (1, 1), (1, 16)]), pick([0, 1, 8]), dtype),
            _strided((tokens, top_k), (top_k, 1), pick([0, 1, 2]), pick([torch.int32, torch.int64])),
            pick([torch.zeros(40, dtype=torch.int64)[pick([0, 0, 1, 2]) :], NO_WORDS, (1, 16, 1 << 40, -1)]),
            _strided((tokens, top_k), (top_k, 1), pick([0, 1]), pick([torch.float32, torch.float16, dtype])),
            pick([torch.float32, dtype]),
        )
    assert len(seen) > 20


def test_addresses_are_aligned_where_all_of_them_are() -> None:
    assert aligned(0, 16, 4096)
    assert not aligned(16, 24)
