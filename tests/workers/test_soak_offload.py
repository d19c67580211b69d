from __future__ import annotations

import torch

from scripts.bench.soak_offload import GROWTH_LIMIT_MB, run


def test_ten_seconds_of_everything_at_once_change_no_output_and_keep_no_memory() -> None:
    threads = torch.get_num_threads()
    with torch.no_grad():
        figures = run(10.0, seed=1)
    torch.set_num_threads(threads)
    assert figures["events"]["steps"] > 0
    assert figures["differing_steps"] == 0
    assert figures["rss_mb_at_the_end"] - figures["rss_mb_after_a_fifth"] < GROWTH_LIMIT_MB
