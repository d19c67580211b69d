"""Small traces and shapes for the planner's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from placement.topology import Topology, load_topology
from placement.trace import RoutingTrace, load_trace

SHARED_TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def shared_trace(name: str) -> RoutingTrace:
    """A development trace, or a skip where this machine has none."""
    path = SHARED_TRACES / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"needs the development trace {path}, which is not part of the repository")
    return load_trace(path)


def make_trace(
    num_tokens: int = 400,
    num_layers: int = 2,
    num_experts: int = 8,
    top_k: int = 2,
    num_requests: int = 10,
    num_kinds: int = 2,
    seed: int = 0,
) -> RoutingTrace:
    """Requests of several kinds; three tokens in four choose among the experts of their kind alone."""
    rng = np.random.default_rng(seed)
    request = np.sort(rng.integers(0, num_requests, num_tokens))
    kind = request // 2 % num_kinds
    group = rng.permutation(num_experts) % num_kinds
    noise = rng.random((num_tokens, num_layers, num_experts))
    own = (group[None, :] == kind[:, None])[:, None, :] & (rng.random((num_tokens, num_layers, 1)) < 0.75)
    experts = np.argsort(noise - 2 * own, axis=2)[:, :, :top_k]
    return RoutingTrace(
        num_experts=num_experts,
        experts=experts.astype(np.uint8 if num_experts <= 256 else np.uint16),
        request=request.astype(np.int64),
        position=np.arange(num_tokens, dtype=np.int32),
        step=np.zeros(num_tokens, np.int64),
        source_rank=np.full(num_tokens, -1, np.int32),
        phase=np.zeros(num_tokens, np.uint8),
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[RoutingTrace, Topology, int, int]:
    """A trace, a topology, rows per rank with room for every expert, and a seed."""
    fanout = draw(st.sampled_from(["1x1", "1x4", "4x1", "2x2", "3x2", "2x2x2", "5x1"]))
    topology = load_topology(fanout)
    num_experts = draw(st.integers(2, 13))
    least = -(-num_experts // topology.num_ranks)
    rows = draw(st.integers(least, num_experts))
    trace = make_trace(
        num_tokens=draw(st.integers(2, 60)),
        num_layers=draw(st.integers(1, 2)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        num_requests=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 1000)),
    )
    return trace, topology, rows, draw(st.integers(0, 3))
