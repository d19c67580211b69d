"""Stage `exchange`: dispatch and combine beside all_to_all_single of the same bytes, called singly and as graphs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from multigpu_crew import Crew, seconds_of

from workers.exchange import Exchange
from workers.gathering import Gathered, GatherExchange
from workers.peers import Peers

HIDDEN, NUM_EXPERTS, TOP_K, EPOCH = 2048, 64, 8, 3
TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096)
AIM = 1.15


class _Case:
    """Buffers for T tokens a rank with random routing, and the calls that are timed."""

    def __init__(self, crew: Crew, groups: Peers, num_tokens: int) -> None:
        rng = np.random.default_rng(crew.rank)
        ranks = crew.num_ranks
        self.crew, self.group, self.num_tokens = crew, groups.data, num_tokens
        self.experts = np.argsort(rng.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K]
        self.ranks = (self.experts // -(-NUM_EXPERTS // ranks)).astype(np.int32)
        hidden = HIDDEN if crew.cuda else 32
        self.hidden = torch.randn((num_tokens, hidden), device=crew.device).to(crew.dtype)
        self.weights = torch.full((num_tokens, TOP_K), 1 / TOP_K, device=crew.device)
        self.gather = GatherExchange(
            groups.data,
            rank=crew.rank,
            num_ranks=ranks,
            num_experts=NUM_EXPERTS,
            partial_dtype=torch.float32,
            device=crew.device,
        )
        self.sparse = Exchange(groups.data, num_ranks=ranks, partial_dtype=torch.float32)
        self.codes = torch.zeros((num_tokens, TOP_K + 1), dtype=torch.int32, device=crew.device)
        # Without what fills a row up: the baseline moves what there is to say.
        row_bytes = sum(part.nbytes for part in self.gather.gather(self.hidden, self.weights, self.codes))
        shape = (ranks * num_tokens, row_bytes // (ranks * num_tokens))
        self.bytes_out, self.bytes_in = (torch.zeros(shape, dtype=torch.uint8, device=crew.device) for _ in range(2))
        self.sums_out, self.sums_in = (
            torch.zeros((ranks * num_tokens, hidden), dtype=torch.float32, device=crew.device) for _ in range(2)
        )

    def baseline(self) -> None:
        self.group.all_to_all(self.bytes_in, self.bytes_out, None, None)
        self.group.all_to_all(self.sums_in, self.sums_out, None, None)

    def gathered(self) -> None:
        self.gather.gather(self.hidden, self.weights, self.codes)
        self.gather.combine(Gathered(capacity=self.num_tokens), self.sums_out, self.num_tokens)

    def parts(self) -> dict[str, Callable[[], None]]:
        """Single collectives, to see where the time goes."""
        sums = self.sums_in[: self.num_tokens]
        gathered = torch.empty(
            (len(self.sums_in), self.hidden.shape[1]), dtype=self.hidden.dtype, device=self.crew.device
        )
        return {
            "a2a_there": lambda: self.group.all_to_all(self.bytes_in, self.bytes_out, None, None),
            "a2a_back": lambda: self.group.all_to_all(self.sums_in, self.sums_out, None, None),
            "gather_hidden": lambda: self.group.all_gather(gathered),
            "gather_all": lambda: _ignore(self.gather.gather(self.hidden, self.weights, self.codes)),
            "reduce_scatter": lambda: self.group.reduce_scatter(sums, self.sums_out),
        }

    def as_called(self) -> None:
        """As a layer calls it: labels from the host, the experts of what came back there."""
        plan, _ = self.gather.dispatch(
            epoch=EPOCH,
            hidden=self.hidden,
            experts=self.experts,
            weights=self.weights,
            ranks=self.ranks,
            capacity=self.num_tokens,
        )
        self.gather.combine(plan, self.sums_out, self.num_tokens)

    def with_counts(self) -> None:
        plan, arrivals = self.sparse.dispatch(
            epoch=EPOCH, hidden=self.hidden, experts=self.experts, weights=self.weights, ranks=self.ranks
        )
        arrivals.experts.cpu()
        self.sparse.combine(plan, self.sums_out[: len(arrivals.hidden)], self.num_tokens)

    def before(self, older: Any) -> Callable[[], None]:
        """The exchange of an older workers/exchange.py, which took experts and ranks on the device."""
        link = older.Exchange(self.group, num_ranks=self.crew.num_ranks, partial_dtype=torch.float32)

        def call() -> None:
            experts, ranks = (torch.from_numpy(part).to(self.crew.device) for part in (self.experts, self.ranks))
            plan, arrivals = link.dispatch(
                epoch=EPOCH, hidden=self.hidden, experts=experts, weights=self.weights, ranks=ranks
            )
            arrivals.experts.cpu()
            link.combine(plan, self.sums_out[: len(arrivals.hidden)], self.num_tokens)

        return call


def stage_exchange(crew: Crew) -> None:
    groups = crew.meet()
    older = _load(crew.job.before) if crew.job.before else None
    for num_tokens in TOKENS if crew.cuda else (1, 16):
        case = _Case(crew, groups, num_tokens)
        times = 50 if crew.cuda else 2
        took: dict[str, float] = {}
        works = {"a2a": case.baseline, "gather": case.gathered, "called": case.as_called, "counts": case.with_counts}
        if older is not None:
            works["before"] = case.before(older)
        for name, work in works.items():
            took[name] = seconds_of(crew, groups.control, work, times)
        if crew.cuda:
            for name, work in {"a2a graph": case.baseline, "gather graph": case.gathered}.items():
                took[name] = seconds_of(crew, groups.control, _graph_of(work).replay, times)
        figures = {f"{name} us".replace(" ", "_"): seconds * 1e6 for name, seconds in took.items()}
        crew.note("exchange", tokens=num_tokens, **figures, ratio=took["gather"] / took["a2a"])
        if crew.cuda:
            graph_ratio = took["gather graph"] / took["a2a graph"]
            crew.note("exchange, as graphs", tokens=num_tokens, ratio=graph_ratio, reached=graph_ratio <= AIM)
            parts = {
                name: seconds_of(crew, groups.control, _graph_of(work).replay, times) * 1e6
                for name, work in case.parts().items()
            }
            crew.note("exchange, parts as graphs us", tokens=num_tokens, **parts)
    groups.leave()


def _ignore(_result: object) -> None:
    return


def _graph_of(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The calls of work as a CUDA graph."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def _load(path: Any) -> Any:
    spec = importlib.util.spec_from_file_location("older_exchange", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
