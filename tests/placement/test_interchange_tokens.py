"""Tokens from every engine's format: the same routing comes back, with its dense layers left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.sources import open_source, read_source, read_trace
from placement.counts import Counts
from placement.errors import TraceError
from placement.interchange.assemble import gather
from placement.interchange.pieces import Hints
from placement.trace import RoutingTrace
from tests.placement.foreign import (
    DENSE,
    EXPERTS,
    HIDDEN,
    own_npz,
    router_lines,
    routing,
    sglang_response,
    slots_of,
    token_record,
    vllm_response,
    with_dense,
    write_dump,
    write_lines,
)


def _read(path: Path, **hints: Any) -> RoutingTrace:
    return read_trace(str(path), Hints(**hints))


def _moe(trace: RoutingTrace) -> tuple[tuple[int, ...], int]:
    assert trace.layers is not None
    return trace.layers.moe, trace.layers.num_hidden


def test_vllm_arrays_of_a_folder_are_a_request_each(tmp_path: Path) -> None:
    chosen = routing(9)
    np.save(tmp_path / "a.npy", with_dense(chosen[:5]))
    np.save(tmp_path / "b.npy", with_dense(chosen[5:]))
    trace = _read(tmp_path, num_experts=EXPERTS)
    assert trace.experts.tolist() == chosen.tolist()
    assert trace.request.tolist() == [0] * 5 + [1] * 4
    assert trace.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert _moe(trace) == ((1, 2, 3), HIDDEN)
    assert trace.num_experts == EXPERTS


def test_vllm_responses_know_prompt_and_answer(tmp_path: Path) -> None:
    chosen = routing(12)
    path = write_lines(tmp_path / "r.jsonl", [vllm_response(chosen[:7], 4), vllm_response(chosen[7:], 2)])
    trace = _read(path, num_experts=EXPERTS)
    assert trace.experts.tolist() == chosen.tolist()
    assert trace.phase.tolist() == [1] * 4 + [0] * 3 + [1] * 2 + [0] * 3


def test_a_batch_file_wraps_its_responses(tmp_path: Path) -> None:
    chosen = routing(6)
    lines = [{"custom_id": "a", "response": {"status_code": 200, "body": vllm_response(chosen, 3)}}]
    assert _read(write_lines(tmp_path / "batch.jsonl", lines)).experts.tolist() == chosen.tolist()


def test_sglang_responses_have_no_header_and_are_understood(tmp_path: Path) -> None:
    chosen = routing(60)
    lines = [sglang_response(chosen[:20], 5), sglang_response(chosen[20:60], 10, start=8)]
    trace = _read(write_lines(tmp_path / "s.jsonl", lines), num_experts=EXPERTS)
    assert trace.experts.tolist() == [*chosen[:20].tolist(), *chosen[28:].tolist()]
    assert trace.position.tolist() == [*range(20), *range(8, 40)]
    assert trace.request.tolist() == [0] * 20 + [1] * 32


def test_a_per_token_dump_is_mapped_back_and_its_sequences_are_recovered(tmp_path: Path) -> None:
    chosen, slots = routing(11), slots_of()
    records = [
        token_record(chosen[:5], slots, positions=[0, 1, 2, 0, 1], lens=[3, 2], number=1),
        token_record(chosen[5:7], slots, positions=[3, 2], lens=None, number=2),
        token_record(chosen[7:9], slots, positions=[0, 1], lens=[2], number=3),
        token_record(chosen[9:11], slots, positions=[3, 2], lens=None, number=4),
    ]
    write_dump(tmp_path / "expert_distribution_recorder_1.0_0.pt", records, slots)
    trace = _read(tmp_path)
    assert trace.experts.tolist() == chosen.tolist()
    assert trace.num_experts == EXPERTS
    assert trace.request.tolist() == [0, 0, 0, 1, 1, 0, 1, 2, 2, 1, 2]
    assert trace.phase.tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0]
    assert trace.step.tolist() == [1] * 5 + [2] * 2 + [3] * 2 + [4] * 2
    assert _moe(trace) == ((1, 2, 3), HIDDEN)


def test_sequences_without_lengths_restart_where_positions_do(tmp_path: Path) -> None:
    chosen, slots = routing(5), slots_of()
    record = token_record(chosen, slots, positions=[0, 1, 2, 0, 1], lens=None)
    write_dump(tmp_path / "d.pt", [record | {"forward_mode": 1}], slots)
    assert _read(tmp_path / "d.pt").request.tolist() == [0, 0, 0, 1, 1]


def test_ranks_that_saw_the_same_tokens_count_once(tmp_path: Path) -> None:
    chosen, slots = routing(4), slots_of()
    for rank in (0, 1):
        record = token_record(chosen, slots, positions=[0, 1, 0, 1], lens=[2, 2], rank=rank, number=7)
        write_dump(tmp_path / f"expert_distribution_recorder_1.0_{rank}.pt", [record], slots)
    opened = open_source(str(tmp_path), Hints())
    assert sum(chunk.num_tokens for chunk in opened.chunks()) == 4
    assert (
        opened.notes.to_dict()["dropped"]["tokens that another rank recorded too (attention is not data-parallel)"][
            "count"
        ]
        == 4
    )


def test_homes_are_unknown_where_one_rank_alone_has_tokens_or_the_plan_is_for_fewer(tmp_path: Path) -> None:
    lines = router_lines(routing(3), step=1, rank=5)
    write_lines(tmp_path / "router_trace_rank5.jsonl", lines)
    assert _read(tmp_path).source_rank.tolist() == [-1] * 3
    write_lines(tmp_path / "router_trace_rank2.jsonl", router_lines(routing(3, seed=1), step=1, rank=2))
    assert _read(tmp_path).source_rank.tolist() == [2] * 3 + [5] * 3
    assert _read(tmp_path, num_ranks=6).source_rank.tolist() == [2] * 3 + [5] * 3
    assert _read(tmp_path, num_ranks=4).source_rank.tolist() == [-1] * 6


def test_megatron_ranks_and_micro_batches_are_joined_over_layers(tmp_path: Path) -> None:
    chosen = routing(14)
    mtp = router_lines(chosen[:1], step=1)[0] | {"block": "mtp", "mtp_idx": 0}
    first, second = router_lines(chosen[:4], step=1), router_lines(chosen[4:7], step=1)
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    write_lines(tmp_path / "router_trace_rank0.jsonl", [*mixed, mtp, *router_lines(chosen[7:10], step=2)])
    write_lines(tmp_path / "router_trace_rank1.jsonl", router_lines(chosen[10:], step=1, rank=1))
    trace = _read(tmp_path, num_experts=EXPERTS)
    assert trace.experts.tolist() == chosen.tolist()
    assert trace.request.tolist() == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 4
    assert trace.source_rank.tolist() == [0] * 10 + [1] * 4


def test_stages_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    lines = router_lines(routing(3), step=1)
    write_lines(tmp_path / "router_trace_rank0.jsonl", lines)
    write_lines(tmp_path / "router_trace_rank1.jsonl", [line | {"layer": line["layer"] + 3} for line in lines])
    with pytest.raises(TraceError, match="pipeline stages cannot be joined"):
        _read(tmp_path)


def test_experts_that_no_source_states_are_counted_and_said(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", with_dense(routing(40)))
    opened = open_source(str(tmp_path), Hints())
    list(opened.chunks())
    assert opened.notes.num_experts == EXPERTS
    assert any("--experts" in line for line in opened.notes.sentences())


def test_tokens_without_routing_are_dropped_and_counted(tmp_path: Path) -> None:
    chosen = with_dense(routing(10))
    chosen[3] = 0
    chosen[5, 2] = [1, 2, 2, 3]
    np.save(tmp_path / "a.npy", chosen)
    opened = open_source(str(tmp_path / "a.npy"), Hints(num_experts=EXPERTS))
    (trace,) = opened.chunks()
    assert trace.position.tolist() == [0, 1, 2, 4, 6, 7, 8, 9]
    dropped = opened.notes.to_dict()["dropped"]
    assert {reason: one["count"] for reason, one in dropped.items()} == {
        "tokens without routing in some MoE layer": 1,
        "tokens that name one expert twice in a layer": 1,
    }


def test_a_torn_last_line_is_dropped_and_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "r.jsonl", [vllm_response(routing(6), 3)] * 2)
    path.write_text(path.read_text()[:-30])
    opened = open_source(str(path), Hints())
    assert sum(chunk.num_tokens for chunk in opened.chunks()) == 6
    assert opened.notes.dropped == {"torn last lines": 1}


def test_sampling_keeps_whole_requests(tmp_path: Path) -> None:
    path = own_npz(tmp_path / "t.npz", routing(400))
    trace = _read(path, sample=0.3)
    assert trace.sampling_rate == 0.3
    assert np.unique(trace.request, return_counts=True)[1].tolist() == [4] * trace.num_requests
    assert 15 <= trace.num_requests <= 45


def test_a_source_beyond_the_memory_that_is_given_is_thinned_by_whole_requests(tmp_path: Path) -> None:
    opened = open_source(str(own_npz(tmp_path / "t.npz", routing(4000))), Hints())
    (whole,) = opened.chunks()
    parts = [whole.select(np.arange(start, start + 400)) for start in range(0, 4000, 400)]
    kept = gather(parts, opened.notes, most_bytes=40_000)
    assert kept.sampling_rate in (0.5, 0.25, 0.125)
    assert 0.7 < kept.num_requests / (1000 * kept.sampling_rate) < 1.4
    assert np.unique(kept.request, return_counts=True)[1].tolist() == [4] * kept.num_requests
    assert any("of the requests are enough" in line for line in opened.notes.sentences())


def test_own_arrays_come_back_as_they_are(tmp_path: Path) -> None:
    chosen = routing(8)
    path = own_npz(tmp_path / "t.npz", chosen, workload=np.ones(8, np.uint8), workload_names=np.array(["a", "b"]))
    trace = _read(path)
    assert trace.experts.tolist() == chosen.tolist()
    assert trace.workload is not None
    assert trace.workload_names == ("a", "b")


def test_a_command_that_needs_tokens_says_so_of_counts(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", counts=np.ones((2, 4)))
    assert isinstance(read_source(str(tmp_path / "c.npz")), Counts)
    with pytest.raises(TraceError, match="counts alone, no tokens"):
        read_trace(str(tmp_path / "c.npz"))


def test_a_folder_of_two_formats_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", routing(4))
    write_lines(tmp_path / "r.jsonl", [vllm_response(routing(6), 3)])
    with pytest.raises(TraceError, match=r"vllm-npy \(a.npy\) and responses \(r.jsonl\)"):
        read_source(str(tmp_path))
    assert _read(tmp_path, form="vllm-npy").num_tokens == 4


def test_a_layer_that_was_dense_and_then_is_not_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", with_dense(routing(4)))
    np.save(tmp_path / "b.npy", routing(4, layers=HIDDEN))
    with pytest.raises(TraceError, match="name the MoE layers with --moe-layers"):
        _read(tmp_path)
    assert _read(tmp_path, moe_layers=tuple(range(DENSE, HIDDEN))).num_tokens == 8


def test_narrow_arrays_are_routing_and_wide_ones_counts(tmp_path: Path) -> None:
    np.save(tmp_path / "routing.npy", with_dense(routing(30)))
    np.save(tmp_path / "counts.npy", np.random.default_rng(0).integers(0, 50, (30, 3, 8)))
    assert isinstance(read_source(str(tmp_path / "routing.npy")), RoutingTrace)
    assert isinstance(read_source(str(tmp_path / "counts.npy")), Counts)
    assert _read(tmp_path / "routing.npy", form="vllm-npy").num_tokens == 30


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.npy").symlink_to(tmp_path / "loop.npy")
    (tmp_path / "loop.npy").symlink_to(tmp_path / "a.npy")
    with pytest.raises(TraceError, match=r"a\.npy"):
        read_source(str(tmp_path / "a.npy"))


def test_a_response_without_routing_is_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "r.jsonl", [vllm_response(routing(6), 3), {"choices": [{"text": "x"}]}])
    opened = open_source(str(path), Hints())
    list(opened.chunks())
    assert opened.notes.dropped == {"responses without routed_experts": 1}
    assert json.dumps(opened.notes.to_dict())
