"""Stage `migration`: GB/s of experts that move, beside raw copies of the same bytes, and the tokens/s that it costs."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from multigpu_crew import Crew, seconds_of, slowest
from multigpu_stack import stack_of

from placement.baselines import linear_placement
from placement.core import ExpertId, Slot
from placement.migration import Move
from placement.topology import load_topology
from workers.host_slab import HostSlab
from workers.movers import make_movers
from workers.peers import Peers

GB = 1e9
# Whether through host memory, and GB/s at most.
WAYS = ((False, None), (False, 1.0), (True, None), (True, 1.0))
PARCEL = 5
# The same steps take 5% to 10% more or less from one second to the next: with moves and without, by turns.
TURNS = 7


class _Ground:
    """What the measurements share. Rank 0 and rank 1 move experts of the layers in `moving`; other ranks watch."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        tiny = not crew.cuda
        self.stack = stack_of(crew, num_layers=2 if tiny else 12, num_experts=8 if tiny else 64, top_k=2 if tiny else 8)
        self.groups = crew.meet(apart=True)
        self.blob = self.stack.expert_bytes
        self.slab: HostSlab = self.stack.parallel.slab
        self.epoch = 1

    def moves(self, count: int, *, both_ways: bool = False) -> list[Move]:
        """count experts from rank 0 to rank 1; or others, half of them back. Nobody has what comes to it."""
        num_layers, num_experts, _ = self.stack.shape
        picked = [ExpertId(layer, expert) for layer in range(num_layers) for expert in range(num_experts)]
        # Ranks of one machine may lend what they hand on: what went the other way is not asked for again.
        picked = picked[-count:] if both_ways else picked[:count]
        found = []
        for number, expert in enumerate(picked):
            source, target = (1, 0) if both_ways and number % 2 else (0, 1)
            found.append(Move(expert=expert, source=Slot(source, 0), target=Slot(target, 0)))
        return found

    def forget(self, moves: list[Move]) -> None:
        """So that they can come once more."""
        for move in moves:
            if move.target.rank == self.crew.rank:
                self.slab.release(move.expert)


def stage_migration(crew: Crew) -> None:
    ground = _Ground(crew)
    raw = raw_copies(ground)
    move_rates(ground, raw)
    what_it_costs(ground)
    ground.groups.leave()


def raw_copies(ground: _Ground) -> dict[str, float]:
    """GB/s of plain copies: pinned host memory to the GPU and back (blob by blob), and between GPUs by NCCL."""
    crew, blob = ground.crew, ground.blob
    count = 64 if crew.cuda else 8
    device = torch.empty((count, blob), dtype=torch.uint8, device=crew.device)
    host = [ground.slab.blob(move.expert) for move in ground.moves(count)]

    def up() -> None:
        for row, source in zip(device, host, strict=False):
            row.copy_(source, non_blocking=True)

    def down() -> None:
        for row, source in zip(device, host, strict=False):
            source.copy_(row, non_blocking=True)

    def wire(tensors: list[torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            for tensor in tensors:
                if crew.rank == 0:
                    ground.groups.bulk.send(tensor, 1)
                elif crew.rank == 1:
                    ground.groups.bulk.receive(tensor, 0)

        return call

    up()
    crew.sync()
    total = len(host) * blob
    control = ground.groups.control
    works = {
        "host to gpu": up,
        "gpu to host": down,
        "nccl send, one tensor": wire([device[: len(host)].view(-1)]),
        "nccl send, five blobs": wire(list(torch.split(device[: len(host)], PARCEL))),
    }
    found = {name: total / seconds_of(crew, control, work, 3) / GB for name, work in works.items()}
    for name, rate in found.items():
        crew.note(f"raw: {name}", gb_s=rate)
    crew.note("nvlink, parcels of five", of_raw=found["nccl send, five blobs"] / found["nccl send, one tensor"])
    return found


def move_rates(ground: _Ground, raw: dict[str, float]) -> None:
    crew = ground.crew
    mover = _mover(ground, ground.groups, None)
    count = 256 if crew.cuda else 8
    bound = min(raw["host to gpu"], raw["gpu to host"], raw["nccl send, one tensor"])
    for what, both_ways in (("one way", False), ("both ways", True)):
        moves = ground.moves(count, both_ways=both_ways)
        rate = _rate(ground, mover, moves)
        crew.note(f"experts move, {what}", gb_s=rate, of_raw=rate / bound, experts=count, mb=ground.blob / 1e6)
    # On one machine: from the other rank's host memory, which it can see.
    blobs = [ground.slab.blob(move.expert) for move in ground.moves(8)]
    copies = [torch.empty_like(blob) for blob in blobs]
    plain = seconds_of(crew, ground.groups.control, lambda: _copy_all(copies, blobs), 2)
    memory = 8 * ground.blob / plain / GB
    crew.note("raw: host memory to host memory", gb_s=memory)
    near = _mover(ground, ground.groups, None, near=True)
    rate = _rate(ground, near, ground.moves(64 if crew.cuda else 4))
    crew.note("experts move on one machine", gb_s=rate, of_raw=rate / memory)


def _copy_all(into: list[torch.Tensor], blobs: list[torch.Tensor]) -> None:
    for row, blob in zip(into, blobs, strict=True):
        row.copy_(blob)


def _mover(ground: _Ground, groups: Peers, cap: float | None, *, near: bool = False) -> Any:
    """near: through host memory, as between ranks of one machine."""
    movers = make_movers(
        ground.slab,
        peers=groups,
        blob_bytes=ground.blob,
        device=ground.crew.device,
        timeout_s=60,
        max_bytes_per_s=cap,
    )
    return movers.near if near else movers.far


def _rate(ground: _Ground, mover: Any, moves: list[Move]) -> float:
    """GB/s, median of three rounds after one to warm up."""
    found = []
    for turn in range(4):
        ground.forget(moves)
        ground.epoch += 1
        slowest(ground.groups.control, 0.0)
        begun = time.perf_counter()
        mover.copy_round(ground.epoch, moves)
        seconds = slowest(ground.groups.control, time.perf_counter() - begun)
        if turn:
            found.append(len(moves) * ground.blob / seconds / GB)
    return statistics.median(found)


def what_it_costs(ground: _Ground) -> None:
    """Tokens/s of the stack while experts move from rank 0 to rank 1 all the time, beside none moving, in turn."""
    crew, stack = ground.crew, ground.stack
    num_layers, num_experts, _ = stack.shape
    placement = linear_placement(num_layers, num_experts, crew.num_ranks, -(-num_experts // crew.num_ranks))
    stack.serve(placement, load_topology(f"1x{crew.num_ranks}"), ground.groups.data)
    for batch in (32, 1024) if crew.cuda else (4,):
        ids = [stack.random_ids(batch, seed + 100 * crew.rank) for seed in range(4)]
        for _ in range(3):
            _steps_per_s(ground, ids, batch, 0.2, None)
        seconds = 0.8 if crew.cuda else 0.3
        for near, cap in WAYS if crew.cuda else ((False, 0.01), (True, 0.01)):
            mover = _mover(ground, ground.groups, None if cap is None else cap * GB, near=near)
            _rate(ground, mover, ground.moves(8))
            turns = [
                (_steps_per_s(ground, ids, batch, seconds, None)[0], *_steps_per_s(ground, ids, batch, seconds, mover))
                for _ in range(TURNS if crew.cuda and cap is not None else 1)
            ]
            alone, busy, moved = (statistics.median(column) for column in zip(*turns, strict=True))
            losses = [1 - with_moves / without for without, with_moves, _ in turns]
            crew.note(
                "serving while experts move",
                way="host memory" if near else "NCCL",
                tokens_a_rank=batch,
                cap_gb_s=cap,
                tokens_per_s=busy * batch * crew.num_ranks,
                without=alone * batch * crew.num_ranks,
                lost=statistics.median(losses),
                least=min(losses),
                most=max(losses),
                moved_gb_s=moved,
            )


def _steps_per_s(
    ground: _Ground, ids: list[torch.Tensor], batch: int, seconds: float, mover: Any
) -> tuple[float, float]:
    """Steps/s until `seconds` are over on any rank, and GB/s that came meanwhile. The mover has a thread of its own."""
    crew, control = ground.crew, ground.groups.control
    moves = ground.moves(32 if crew.cuda else 2)
    stop = threading.Event()
    rounds = 0

    def move() -> None:
        nonlocal rounds
        # Both ends must do the same rounds: whether another one follows is agreed over a second control group.
        while slowest(ground.groups_of_mover.control, float(stop.is_set())) == 0:
            ground.forget(moves)
            ground.epoch += 1
            mover.copy_round(ground.epoch, moves)
            rounds += 1

    thread = None
    if mover is not None:
        ground.groups_of_mover = crew.meet(cpu=True)
        thread = threading.Thread(target=move)
        thread.start()
    steps, begun = 0, time.perf_counter()
    while slowest(control, float(time.perf_counter() - begun > seconds)) == 0:
        stack_out = ground.stack.step(ids[steps % len(ids)], batch)
        steps += 1
    del stack_out
    crew.sync()
    took = time.perf_counter() - begun
    rate, moved = steps / took, rounds * len(moves) * ground.blob / took / GB
    if thread is not None:
        stop.set()
        thread.join()
        ground.groups_of_mover.leave()
    return rate, moved
