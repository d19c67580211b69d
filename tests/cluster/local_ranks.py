"""Ranks without a model, all in one process: real slabs, real epochs, and copies that take a blob from another slab.

They vote after every call, as ranks that serve do before every step. A rank can be killed at any call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.forming import Meeting
from cluster.history import History, Member
from cluster.planner import Planner
from cluster.service import PlacementService
from placement.baselines import linear_placement
from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId, Placement
from placement.errors import MigrationError
from placement.planfile import Plan
from placement.topology import Topology, load_topology
from placement.trace import RoutingTrace, write_segment
from workers.epochs import EpochKeeper
from workers.host_slab import HostSlab
from workers.links import DirectLink
from workers.routing import RoutingTable
from workers.slot_cache import SlotCache
from workers.vitals import Holdings, WorkerStatus

LAYERS, EXPERTS, RANKS, ROWS, BLOB = 2, 8, 4, 3, 256
TOPOLOGY = load_topology("2x2")
MEMBERS = tuple(Member(seat=seat, actor=f"seat-{seat}") for seat in range(RANKS))


def blob_of(expert: ExpertId) -> torch.Tensor:
    """What the checkpoint holds of an expert: no two are alike."""
    return torch.full((BLOB,), 1 + expert.layer * EXPERTS + expert.expert, dtype=torch.uint8)


class Rank:
    """One rank: its slab, its epochs, and whether it serves."""

    def __init__(self, rank: int, placement: Placement) -> None:
        self.slab = HostSlab(capacity=4 * LAYERS * ROWS, blob_bytes=BLOB)
        for expert in placement.experts_on(rank):
            self.slab.add(expert, blob_of(expert))
        self.cache = SlotCache(
            slab=self.slab,
            policy=EvictionPolicy(PolicyName.LRU, num_layers=LAYERS, num_experts=EXPERTS, top_k=2, share=0.3),
            link=DirectLink(),
            num_slots=LAYERS,
            blob_bytes=BLOB,
            device=torch.device("cpu"),
        )
        self.table = RoutingTable(placement=placement, topology=TOPOLOGY, rank=rank, top_k=2)
        self.serving = True
        self.keep_epochs()

    def keep_epochs(self) -> None:
        self.epochs = EpochKeeper(table=self.table, slab=self.slab, cache=self.cache, timeout_s=5)


class LocalRanks:
    """The ranks of one cluster by actor name. fault: (method, rank) at which a call fails, once; on_call is told each
    (method, rank) before it is made, and may kill."""

    def __init__(self, placement: Placement, fault: tuple[str, int] | None = None) -> None:
        self.actors = {member.actor: Rank(member.seat, placement) for member in MEMBERS}
        self.fault = fault
        self.served: list[set[int]] = []
        self.calls: list[tuple[str, int]] = []
        self.on_call: Callable[[str, int], None] = lambda method, rank: None
        self.names = [member.actor for member in MEMBERS]

    @property
    def ranks(self) -> list[Rank]:
        return [self.actors[name] for name in self.names if name in self.actors]

    def connect(self, members: Sequence[Member]) -> LocalRanks:
        self.names = [member.actor for member in members]
        return self

    def kill(self, name: str) -> None:
        """The process is gone, and the others' engines break off."""
        del self.actors[name]
        for rank in self.actors.values():
            rank.serving = False
            rank.epochs.close()

    def call(self, method: str, arguments: Iterable[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        answers = []
        for rank, values in arguments:
            self.calls.append((method, rank))
            self.on_call(method, rank)
            if (method, rank) == self.fault:
                self.fault = None
                raise MigrationError(f"{method}: rank {rank} does not answer")
            if self.names[rank] not in self.actors:
                raise MigrationError(f"{method}: rank {rank} is gone")
            answers.append(getattr(self, method)(self.actors[self.names[rank]], rank, *values))
        self.vote()
        return answers

    def vote(self) -> None:
        serving = [rank for rank in self.ranks if rank.serving]
        if len(serving) < len(self.names):
            return
        agreed = min(rank.epochs.vote() for rank in serving)
        for rank in serving:
            rank.epochs.enter(agreed)
        self.served.append({rank.table.epoch for rank in serving})

    def flush_trace(self, rank: Rank, number: int) -> None:
        pass

    def expert_bytes(self, rank: Rank, number: int) -> int:
        return BLOB

    def copy_round(self, rank: Rank, number: int, epoch: int, moves: Any) -> int:
        for move in moves:
            if move.target.rank == number:
                source = self.actors.get(self.names[move.source.rank])
                if source is None:
                    raise MigrationError(f"copying {move.expert}: the other rank is gone")
                rank.slab.add(move.expert, source.slab.blob(move.expert))
        return 0

    def prepare(self, rank: Rank, number: int, target: Placement) -> None:
        rank.epochs.prepare(target)

    def commit(self, rank: Rank, number: int, epoch: int) -> None:
        rank.epochs.commit(epoch)

    def await_epoch(self, rank: Rank, number: int, epoch: int, timeout_s: float) -> None:
        rank.epochs.await_epoch(epoch, timeout_s)

    def abort(self, rank: Rank, number: int, epoch: int) -> int:
        return rank.epochs.abort(epoch)

    def drop(self, rank: Rank, number: int, epoch: int) -> int:
        return rank.epochs.drop(epoch)

    def leave(self, rank: Rank, number: int) -> Holdings:
        rank.serving = False
        rank.epochs.close()
        return Holdings(epoch=rank.table.epoch, experts=rank.slab.experts(), capacity=rank.slab.capacity)

    def open_rendezvous(self, rank: Rank, number: int, host: str, interface: str, epoch: int, num_ranks: int) -> str:
        return "here"

    def take_seat(self, rank: Rank, number: int, rendezvous: str, own: int, num_ranks: int) -> None:
        assert (rendezvous, own, num_ranks) == ("here", number, len(self.names))

    def release_except(self, rank: Rank, number: int, experts: frozenset[ExpertId]) -> None:
        for expert in rank.slab.experts() - experts:
            rank.slab.release(expert)

    def restore(self, rank: Rank, number: int, experts: frozenset[ExpertId]) -> None:
        for expert in experts:
            rank.slab.add(expert, blob_of(expert))

    def serve(self, rank: Rank, number: int, placement: Placement, topology: Topology, own: int) -> None:
        missing = placement.experts_on(own) - rank.slab.experts()
        assert not missing
        self.release_except(rank, number, placement.experts_on(own))
        rank.table.take_seat(own, topology, placement)
        rank.keep_epochs()
        rank.serving = True

    def status(self, rank: Rank, number: int) -> WorkerStatus:
        return WorkerStatus(
            rank=number,
            epoch=rank.table.epoch,
            alive=rank.serving,
            error=None,
            steps=0,
            experts=0,
            host_slab_bytes=rank.slab.num_bytes,
            slot_bytes=0,
            cache={},
            recorder={},
            traffic={},
        )


def make_trace() -> RoutingTrace:
    """Two kinds of requests that use the even and the odd experts."""
    rng = np.random.default_rng(0)
    num_tokens = 600
    request = np.repeat(np.arange(20), num_tokens // 20)
    pick = np.sort(rng.random((num_tokens, LAYERS, EXPERTS // 2)).argsort(axis=2)[:, :, :2], axis=2)
    return RoutingTrace(
        num_experts=EXPERTS,
        experts=(2 * pick + (request // 2 % 2)[:, None, None]).astype(np.uint8),
        request=request.astype(np.int64),
        position=np.tile(np.arange(num_tokens // 20), 20).astype(np.int32),
        step=np.zeros(num_tokens, np.int64),
        source_rank=np.full(num_tokens, -1, np.int32),
        phase=np.zeros(num_tokens, np.uint8),
    )


def write_trace(folder: Path) -> None:
    write_segment(make_trace(), folder / "rank00000-00000000.safetensors")


def first_plan() -> Plan:
    return Plan(placement=linear_placement(LAYERS, EXPERTS, RANKS, ROWS), topology=TOPOLOGY, measured={})


class QuickPlanner(Planner):
    """One whose plan is known beforehand: planning is not what is tested, and takes the most time."""

    def recorded(self) -> RoutingTrace:
        return make_trace()

    def plan(self, trace: RoutingTrace, most_copies: int | None) -> Plan:
        current = self._book.current.placement
        table = current.physical_to_logical.reshape(LAYERS, current.num_ranks, -1)
        turned = np.roll(table, 1, axis=1).reshape(LAYERS, -1)
        measured = {"trust": {"after_over_before": {"ratio": 0.5, "high": 0.6, "holds": True}}}
        return Plan(
            placement=replace(current, epoch=self._book.next_epoch(), physical_to_logical=turned),
            topology=self._book.current.topology,
            measured=measured,
        )


class QuickService(PlacementService):
    """A service with such a planner."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._planner = QuickPlanner(self._book, self._traffic, min_gain=options["min_gain"], seed=options["seed"])


def new_service(
    folder: Path, ranks: LocalRanks, min_gain: float = 0.01, kind: type[PlacementService] = PlacementService
) -> PlacementService:
    """A service that has not formed its ranks yet."""
    return kind(
        history=History(folder / "history.sqlite"),
        connect=ranks.connect,
        initial=first_plan(),
        trace_dir=folder,
        min_gain=min_gain,
        seed=0,
        meeting=Meeting(host="127.0.0.1", interface="lo"),
    )
