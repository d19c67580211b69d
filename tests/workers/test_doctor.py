from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.doctor import Verdict, allowed_memory, examine, judge_link, shared_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpu_says_so() -> None:
    first = examine()[0]
    assert (first.name, first.found, first.verdict) == ("gpu", "none", Verdict.ABSENT)


@pytest.mark.parametrize(
    ("numbers", "pinned", "verdict", "words"),
    [
        ([5, 5, 16, 16], 55e9, Verdict.OK, ""),
        ([4, 5, 16, 16], 25e9, Verdict.WARNING, "below what the card can do"),
        ([5, 5, 8, 16], 27e9, Verdict.WARNING, "below what the card can do"),
        ([5, 5, 16, 16], 20e9, Verdict.WARNING, "measured 20 GB/s of 63"),
    ],
)
def test_a_link_is_judged_by_generation_width_and_measure(
    numbers: list[int], pinned: float, verdict: Verdict, words: str
) -> None:
    finding = judge_link("gpu 0", numbers, pinned)
    assert finding.verdict == verdict
    assert words in finding.advice


def test_a_small_or_missing_shared_memory_is_told(tmp_path: Path) -> None:
    assert shared_memory(tmp_path / "none").verdict == Verdict.ABSENT
    assert allowed_memory() > 0
