from __future__ import annotations

import pytest
import torch

from workers.cuda_runtime import bare_submit


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA runtime")
def test_where_there_is_no_cuda_runtime_copies_go_through_torch() -> None:
    assert bare_submit(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False")
def test_a_bare_copy_in_chunks_arrives_whole() -> None:
    submit = bare_submit(torch.device("cuda"))
    assert submit is not None
    source = torch.randint(256, (10_001,), dtype=torch.uint8).pin_memory()
    target = torch.zeros(10_001, dtype=torch.uint8, device="cuda")
    submit(target, source, torch.cuda.current_stream().cuda_stream, 1000)
    assert torch.equal(target.cpu(), source)
