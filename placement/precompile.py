"""Compile the numba functions ahead: `python -m placement.precompile`, run once by scripts/install.

Compiled code is cached beside the sources; without this step the first plan and the first served token would wait for
the compiler. A tiny trace goes through planning, homes, evaluation and a report, with the types that real ones have.
"""

from __future__ import annotations

import numpy as np

from placement.baselines import linear_placement
from placement.cache.policy import compile_policies
from placement.cache.score import score_policies
from placement.comparing import Serving, assess
from placement.costs import ModelSizes
from placement.dispatch import choose_ranks
from placement.interchange.tables import parse_table
from placement.plan import make_plan
from placement.report import make_report
from placement.topology import load_topology
from placement.trace import RoutingTrace


def precompile() -> None:
    """Run everything that is compiled once, on four ranks and two layers."""
    rng = np.random.default_rng(0)
    num_tokens, layers, experts = 64, 2, 8
    trace = RoutingTrace(
        num_experts=experts,
        experts=rng.random((num_tokens, layers, experts)).argsort(axis=2)[:, :, :2].astype(np.uint8),
        request=np.repeat(np.arange(4), num_tokens // 4).astype(np.int64),
        position=np.tile(np.arange(num_tokens // 4), 4).astype(np.int32),
        step=np.zeros(num_tokens, np.int64),
        source_rank=np.zeros(num_tokens, np.int32),
        phase=np.zeros(num_tokens, np.uint8),
    )
    topology = load_topology("2x2")
    current = linear_placement(layers, experts, topology.num_ranks, 3)
    plan = make_plan(trace, topology, rows_per_rank=3, current=current)
    make_plan(trace, topology, rows_per_rank=3)
    make_report(plan, trace, before=current)
    assess(current, topology, trace, trace.source_rank, Serving(sizes=ModelSizes(), gpu_share=0.5))
    list(score_policies(trace, shares=[0.5], batches=[1]))
    parse_table(b"[[1,2]]")
    compile_policies()
    choose_ranks(
        np.zeros((1, 2), np.int64),
        np.zeros(1, np.int32),
        current.weights_per_rank()[0],
        np.ascontiguousarray(topology.node_of_rank()),
    )


if __name__ == "__main__":
    precompile()
