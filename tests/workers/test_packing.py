"""Rows of an exchange: what is packed comes out again, and the kernel (on a GPU) packs the same bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.packing import ALIGNED_BYTES, pack, pack_for, row_elements, split_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _example(
    tokens: int, spare: int, hidden_size: int, top_k: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 100 + top_k)
    rows = torch.empty((tokens + spare, row_elements(hidden_size, top_k, dtype)), dtype=dtype)
    hidden = torch.randn((tokens, hidden_size), generator=generator).to(dtype)
    codes = torch.randint(-1, 1 << 20, (tokens + spare, top_k + 1), generator=generator, dtype=torch.int32)
    weights = torch.rand((tokens, top_k), generator=generator)
    return rows.to(device), hidden.to(device), codes.to(device), weights.to(device)


@settings(max_examples=40)
@given(st.integers(0, 5), st.integers(0, 3), st.sampled_from([8, 24, 64]), st.integers(1, 9), st.sampled_from(DTYPES))
def test_what_is_packed_comes_out_again_and_rows_without_a_token_are_zero(
    tokens: int, spare: int, hidden_size: int, top_k: int, dtype: torch.dtype
) -> None:
    rows, hidden, codes, weights = _example(tokens, spare, hidden_size, top_k, dtype)
    pack(rows, hidden, codes, weights)
    states, label = split_rows(rows, hidden_size, top_k)
    assert states[:tokens].equal(hidden)
    assert not states[tokens:].any()
    assert label[:, : top_k + 1].equal(codes)
    assert label.view(torch.float32)[:tokens, top_k + 1 :].equal(weights)
    assert rows.shape[1] * dtype.itemsize % ALIGNED_BYTES == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "spare", "hidden_size", "top_k"), [(0, 2, 64, 8), (3, 0, 2048, 8), (5, 4, 72, 1)])
def test_the_kernel_packs_the_same(tokens: int, spare: int, hidden_size: int, top_k: int, dtype: torch.dtype) -> None:
    rows, hidden, codes, weights = _example(tokens, spare, hidden_size, top_k, dtype, "cuda")
    plain, kernel = rows.clone(), rows.clone()
    pack(plain, hidden, codes, weights)
    pack_for(rows.device)(kernel, hidden, codes, weights)
    for ours, theirs in zip(split_rows(kernel, hidden_size, top_k), split_rows(plain, hidden_size, top_k), strict=True):
        assert ours.equal(theirs)
