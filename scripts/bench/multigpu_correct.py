"""Stage `correctness`: logits of a model whose experts lie on all ranks beside one device's, while experts move, and
after a rank is killed.

Weights are random, the same on every rank. The routing is the plain model's, forced on the ranks: with random weights
near ties are common, and another expert is another answer. So what is compared is what Moetis does: which weights a
token meets, on which rank, and what comes home. A token's error is the norm of the difference over the norm. The
yardstick is the plain model against itself, a sequence at a time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from multigpu_crew import Crew
from torch import nn
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from placement.core import ExpertId, Placement
from placement.elastic import place_without
from placement.errors import ExchangeError
from placement.migration import plan_migration
from placement.topology import load_topology
from workers.blob import layout_of
from workers.epochs import EpochKeeper
from workers.expert_layer import ExpertLayer
from workers.movers import make_movers
from workers.parallel_model import ParallelModel
from workers.peers import Peers
from workers.recorder import Recorder, RecorderOptions
from workers.seam import experts_modules, take_over
from workers.step_clock import StepClock

Routing = list[tuple[torch.Tensor, torch.Tensor]]
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
SPARE, LOST = 1.25, "lost"
# Sequences and their length by batch; rank r has r sequences more. None: a step without work of one's own.
BATCHES = {"long": (2, 96), "short": (5, 7)}
ORDER = ("long", "short", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's shape with random weights; layers: as many as are built of those that it has."""

    name: str
    config: type
    layers: int
    of_layers: int
    size: dict[str, Any]


def shapes(*, tiny: bool) -> list[Shape]:
    """Qwen3-30B-A3B and OLMoE: widths as they are; depth and vocabulary cut."""
    qwen = {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    olmoe = {
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    if tiny:
        small = {"hidden_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "num_attention_heads": 4}
        qwen |= small | {"moe_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
        olmoe |= small | {"intermediate_size": 16, "num_key_value_heads": 4}
    return [
        Shape(name="Qwen3-30B-A3B", config=Qwen3MoeConfig, layers=2 if tiny else 4, of_layers=48, size=qwen),
        Shape(name="OLMoE-1B-7B", config=OlmoeConfig, layers=2 if tiny else 6, of_layers=16, size=olmoe),
    ]


def build(shape: Shape, crew: Crew) -> PreTrainedModel:
    """The plain model on this rank's device, the same on all."""
    config = shape.config(**shape.size, num_hidden_layers=shape.layers, vocab_size=512, max_position_embeddings=512)
    torch.manual_seed(7)
    with torch.device(crew.device):
        model = AutoModelForCausalLM.from_config(config, dtype=crew.dtype)
    plain: PreTrainedModel = model.eval().requires_grad_(False)
    return plain


class Kept:
    """A model's experts, kept where they are when the model lets go of them: the checkpoint of this bench."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = experts_modules(model)
        self.layout = layout_of(modules[0], int(modules[0].num_experts))
        self._layers = [
            {field.name: module.get_parameter(field.name).detach() for field in self.layout.fields}
            for module in modules
        ]

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        for field in self.layout.fields:
            target = out[field.offset : field.offset + field.num_bytes].view(field.dtype).view(field.shape)
            target.copy_(self._layers[expert.layer][field.name][expert.expert])


class Reference:
    """The plain model's logits and routing of each batch, [B * S, ...]."""

    def __init__(self, model: PreTrainedModel, rank: int, device: torch.device) -> None:
        torch.manual_seed(100 + rank)
        self.ids = {
            name: torch.randint(0, 512, (count + rank, length), device=device)
            for name, (count, length) in BATCHES.items()
        }
        self.routing: dict[str, Routing] = {}
        self.logits: dict[str, torch.Tensor] = {}
        layers = experts_modules(model)
        seen: Routing = []
        forced: Routing = []

        def plain(module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if forced:
                ids, weights = forced[layers.index(module)]
            else:
                seen.append((ids.clone(), weights.clone()))
            out: torch.Tensor = grouped_mm_experts_forward(module, hidden, ids, weights)
            return out

        ALL_EXPERTS_FUNCTIONS.register("plain", plain)
        model.set_experts_implementation("plain")
        worst = []
        with torch.no_grad():
            for name, ids in self.ids.items():
                seen.clear()
                self.logits[name] = model(ids).logits.flatten(0, 1)
                self.routing[name] = list(seen)
                alone = []
                for row in range(len(ids)):
                    part = slice(row * ids.shape[1], (row + 1) * ids.shape[1])
                    forced[:] = [(chosen[part], weight[part]) for chosen, weight in self.routing[name]]
                    alone.append(model(ids[row : row + 1]).logits[0])
                forced.clear()
                worst.append(errors(torch.cat(alone), self.logits[name]))
        self.yardstick = torch.cat(worst)


def errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[T]: each token's relative error."""
    return (out.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)


class _Forced:
    """An expert layer with the plain model's routing; it can kill its process."""

    def __init__(self, serving: Serving, layer: int, inner: ExpertLayer) -> None:
        self._serving, self._layer, self._inner = serving, layer, inner

    def __call__(self, hidden: torch.Tensor, _ids: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        if self._serving.dies and self._layer == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ids, weights = self._serving.routing[self._layer]
        return self._inner(hidden, ids, weights)


class Serving:
    """One rank of the parallel model, stepping with the others."""

    def __init__(self, crew: Crew, shape: Shape) -> None:
        self.crew = crew
        model = build(shape, crew)
        self.reference = Reference(model, crew.rank, crew.device)
        self.kept = Kept(model)
        self.placement = spread(shape, crew.num_ranks, epoch=0, shift=0)
        self.topology = load_topology(f"1x{crew.num_ranks}")
        self.parallel = ParallelModel(
            model,
            experts=self.kept,
            placement=self.placement,
            topology=self.topology,
            rank=crew.rank,
            device=crew.device,
            cache_share=1.0,
            host_slab_rows=2.0,
            gathers=True,
        )
        self.parallel.table.warm_up()
        self.routing: Routing = []
        self.dies = False
        self.found: list[torch.Tensor] = []
        self.steps = 0

    def serve(self, groups: Peers) -> None:
        self.groups = groups
        self.mover = make_movers(
            self.parallel.slab,
            peers=groups,
            blob_bytes=self.kept.layout.num_bytes,
            device=self.crew.device,
            timeout_s=60,
        )
        options = RecorderOptions(folder=None)
        shape = self.parallel.shape
        recorder = Recorder(
            options,
            rank=0,
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            model="bench",
        )
        self.parallel.attach(groups.data, recorder, StepClock())
        self.layers = [_Forced(self, layer, inner) for layer, inner in enumerate(self.parallel.layers)]
        take_over(self.parallel.model, list(self.layers))
        self.keeper = EpochKeeper(
            table=self.parallel.table, slab=self.parallel.slab, cache=self.parallel.cache, timeout_s=60
        )

    def step(self) -> None:
        """One step of all ranks; this rank's logits are compared."""
        name = ORDER[(self.steps + self.crew.rank) % len(ORDER)]
        self.steps += 1
        num_tokens = 0 if name is None else self.reference.ids[name].numel()
        votes = torch.tensor([-self.keeper.vote(), num_tokens], dtype=torch.int64)
        self.groups.control.all_reduce_max(votes)
        self.keeper.enter(-int(votes[0]))
        self.parallel.table.expect(int(votes[1]))
        if name is None:
            self.parallel.join_step()
            return
        self.routing = self.reference.routing[name]
        self.parallel.table.begin_step()
        with torch.no_grad():
            logits = self.parallel.model(self.reference.ids[name]).logits.flatten(0, 1)
        self.parallel.table.begin_step()
        self.found.append(errors(logits, self.reference.logits[name]))

    def take_errors(self) -> tuple[float, int]:
        """The worst token since the last call, and the tokens."""
        found, self.found = torch.cat(self.found), []
        return float(found.max()), len(found)


def spread(shape: Shape, num_ranks: int, *, epoch: int, shift: int) -> Placement:
    """Experts in id order over the ranks, with empty rows; every second one `shift` ranks further. With a shift the
    spare rows hold copies of the next rank's first experts."""
    num_experts = int(shape.size["num_experts"])
    share = -(-num_experts // num_ranks)
    rows = int(share * SPARE)
    table = np.full((num_ranks, rows), -1, np.int32)
    used = np.zeros(num_ranks, int)
    for expert in range(num_experts):
        rank = (expert // share + (shift if expert % 2 else 0)) % num_ranks
        table[rank, used[rank]] = expert
        used[rank] += 1
    if shift:
        first = table.copy()
        for rank in range(num_ranks):
            spare = rows - used[rank]
            table[rank, used[rank] :] = first[(rank + 1) % num_ranks, :spare]
    return Placement(
        epoch=epoch,
        num_ranks=num_ranks,
        num_experts=num_experts,
        physical_to_logical=np.tile(table.reshape(1, -1), (shape.layers, 1)),
    )


def migrate(serving: Serving, target: Placement) -> None:
    """Copy, prepare and commit, on a thread of its own beside the steps."""
    plan = plan_migration(serving.placement, target, serving.topology, serving.kept.layout.num_bytes)
    for moves in plan.rounds:
        serving.mover.copy_round(target.epoch, moves)
    serving.keeper.prepare(target)
    serving.keeper.commit(target.epoch)


def check(crew: Crew, shape: Shape) -> None:
    serving = Serving(crew, shape)
    bound = TOLERANCE[crew.dtype]

    def report(phase: str, **more: Any) -> None:
        error, tokens = serving.take_errors()
        crew.note(
            f"{shape.name}, {phase}",
            layers=f"{shape.layers}/{shape.of_layers}",
            ranks=len(serving.parallel.table.node_of_rank),
            tokens=tokens,
            worst_error=error,
            yardstick=float(serving.reference.yardstick.max()),
            tolerance=bound,
            equal=error <= bound,
            **more,
        )

    serving.serve(crew.meet())
    for _ in range(2 * len(ORDER)):
        serving.step()
    report("before")
    target = spread(shape, crew.num_ranks, epoch=1, shift=1)
    thread = threading.Thread(target=migrate, args=(serving, target))
    thread.start()
    begun, steps = time.perf_counter(), serving.steps
    while serving.parallel.table.epoch != target.epoch:
        serving.step()
    thread.join()
    report("during a move", steps=serving.steps - steps, seconds=time.perf_counter() - begun)
    serving.keeper.drop(target.epoch)
    serving.placement = target
    for _ in range(2 * len(ORDER)):
        serving.step()
    copies = int((target.copies_per_rank().sum(axis=1) > 1).sum())
    report("after, with replicas", replicated=copies)
    lose_a_rank(serving, shape)
    report("a rank killed", experts_here=len(serving.parallel.slab.experts()))
    serving.groups.leave()


def lose_a_rank(serving: Serving, shape: Shape) -> None:
    """The last rank kills itself in the middle of a step; the others form anew and serve all experts."""
    crew = serving.crew
    serving.steps = 0
    # The last rank's next step has work: it dies in its second layer.
    serving.steps = (-crew.rank) % len(ORDER) if crew.rank == crew.num_ranks - 1 else 0
    serving.dies = crew.rank == crew.num_ranks - 1
    watcher = threading.Thread(target=lambda: (crew.mail[crew.rank].get(), serving.groups.leave()))
    watcher.start()
    try:
        while True:
            serving.step()
    except ExchangeError:
        watcher.join()
    serving.found.clear()
    left = crew.num_ranks - 1
    rows = max(serving.placement.rows_per_rank, -(-int(shape.size["num_experts"]) // left))
    load = np.ones((shape.layers, int(shape.size["num_experts"])))
    recovery = place_without(serving.placement, frozenset({left}), load, rows_per_rank=rows)
    serving.placement = recovery.placement
    groups = crew.meet(num_ranks=left)
    parallel = serving.parallel
    for expert in sorted(recovery.placement.experts_on(crew.rank) - parallel.slab.experts()):
        serving.kept.read(expert, parallel.slab.claim(expert))
        parallel.slab.publish(expert)
    parallel.table.take_seat(crew.rank, load_topology(f"1x{left}"), recovery.placement)
    parallel.cache.let_go()
    serving.serve(groups)
    for _ in range(2 * len(ORDER)):
        serving.step()


def stage_correctness(crew: Crew, which: int) -> None:
    """One of the shapes; the processes are spent afterwards, since a rank dies."""
    check(crew, shapes(tiny=crew.job.tiny)[which])
