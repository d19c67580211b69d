from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from workers import cuda_edge
from workers.cuda_edge import link_for
from workers.links import DirectLink
from workers.pinning import HostRows

CUDA = torch.device("cuda", 0)


def _rows(num_pinned: int) -> HostRows:
    return HostRows(torch.zeros((4, 256), dtype=torch.uint8), num_pinned)


def test_a_cpu_copies_at_once_and_a_gpu_has_no_ring_where_all_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(link_for(torch.device("cpu"), _rows(0)), DirectLink)
    plain = object()
    monkeypatch.setattr(cuda_edge, "CudaLink", lambda device: plain)
    assert link_for(CUDA, _rows(4)) is plain


def test_where_not_even_the_ring_can_be_pinned_copies_are_plain_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore of it")

    plain = SimpleNamespace(urgent=None, patient=None)
    monkeypatch.setattr(cuda_edge, "CudaLink", lambda device: plain)
    monkeypatch.setattr(cuda_edge, "CudaEdge", refuse)
    with caplog.at_level(logging.WARNING):
        assert link_for(CUDA, _rows(3)) is plain
    assert "CUDA does not pin 40 MiB for a bounce ring either (CUDA error: out of memory)" in caplog.text
