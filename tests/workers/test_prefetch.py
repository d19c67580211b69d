"""Prefetching: what limits it, what the next router says, and that nothing but the time depends on it."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from placement.baselines import linear_placement
from placement.topology import load_topology
from tests.workers.test_model_seam import CONFIGS
from workers.foresight import next_routers
from workers.loading import load_model, shape_of
from workers.options import RecorderOptions, WorkerOptions
from workers.prefetch import ENOUGH, PAUSE_CALLS, TRIAL_EVERY, LinkRoom, PrefetchJudge, PrefetchTrial
from workers.requests import GenerationRequest
from workers.seam import experts_modules
from workers.worker import ExpertWorker

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"


def test_prefetching_that_never_hits_stops_and_tries_again_later() -> None:
    judge = PrefetchJudge()
    for _ in range(ENOUGH):
        assert judge.allows()
        judge.wasted()
    assert sum(judge.allows() for _ in range(PAUSE_CALLS + 1)) == 0
    assert judge.allows()


class _Clock:
    """Layers of a step, and what is copied in each, over a link of 1,000 bytes a second unless given."""

    def __init__(self, bytes_per_s: float | None = 1000.0) -> None:
        self.now, self.copied = 0.0, 0
        self.room = LinkRoom(lambda: self.now, bytes_per_s)

    def layers(self, count: int, *, seconds: float, copied: int) -> None:
        for layer in range(count):
            self.room.begin_layer(layer, self.copied)
            self.now += seconds
            self.copied += copied


def test_prefetches_get_the_time_in_which_the_link_idles() -> None:
    clock = _Clock()
    assert clock.room.left() == 0
    clock.layers(8, seconds=0.1, copied=40)
    assert clock.room.left() == pytest.approx(60)


def test_a_link_that_layers_wait_for_has_no_room_whatever_made_it_busy() -> None:
    clock = _Clock()
    clock.layers(8, seconds=0.1, copied=90)
    assert clock.room.left() == 0
    # Twice as long, since as much again was fetched ahead: that is no room.
    clock.layers(40, seconds=0.2, copied=180)
    assert clock.room.left() == 0


def test_the_time_between_steps_is_not_room() -> None:
    clock = _Clock()
    for _ in range(20):
        clock.layers(4, seconds=0.1, copied=90)
        clock.now += 60.0
    assert clock.room.left() == 0


def test_a_link_whose_bandwidth_is_not_known_has_no_room_and_one_without_limit_always() -> None:
    for rate, left in ((None, 0.0), (math.inf, math.inf)):
        clock = _Clock(rate)
        clock.layers(4, seconds=0.1, copied=0)
        assert clock.room.left() == left


@pytest.mark.parametrize(("slower", "pays"), [(True, False), (False, True)])
def test_a_trial_finds_out_whether_steps_are_faster_with_prefetches(slower: bool, pays: bool) -> None:
    trial = PrefetchTrial()
    for step in range(TRIAL_EVERY):
        seconds = 0.011 if trial.wants(step) is slower else 0.010
        trial.took(step, 300 if step % 5 == 0 else 8, 1.0 if step % 5 == 0 else seconds)
    assert trial.pays is pays
    assert trial.wants(TRIAL_EVERY - 1) is pays
    assert {trial.wants(TRIAL_EVERY + step) for step in range(16, 32)} == {True, False}


def test_idle_steps_decide_nothing() -> None:
    trial = PrefetchTrial()
    for step in range(TRIAL_EVERY):
        trial.took(step, 0, 1.0 if trial.wants(step) else 0.1)
    assert trial.pays


@pytest.mark.parametrize("name", CONFIGS)
def test_the_next_router_says_of_its_own_input_what_its_layer_will_choose(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32).eval()
    model.requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in experts_modules(model):
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[:2]))
    model(torch.arange(7).unsqueeze(0))
    *routers, last = next_routers(model, top_k=shape_of(model).top_k)
    assert last is None
    for router, (hidden, chosen) in zip(routers, seen[1:], strict=True):
        assert router is not None
        named = router(hidden)
        assert named is not None
        assert named.sort(dim=1).values.equal(chosen.sort(dim=1).values.to(named.dtype))


def test_texts_are_those_of_the_plain_model_while_experts_are_fetched_ahead() -> None:
    options = WorkerOptions(
        model=MODEL, recorder=RecorderOptions(folder=None), kv_pages=64, cache_share=0.3, link_bytes_per_s=2e9
    )
    model = load_model(options, torch.device("cpu"))
    shape = shape_of(model)
    placement = linear_placement(shape.num_layers, shape.num_experts, 1, shape.num_experts)
    worker = ExpertWorker(options, rank=0, topology=load_topology("1x1"), placement=placement)
    worker.join(worker.open_rendezvous(host="127.0.0.1", interface="lo"))
    prompts = {str(start): tuple(range(start, start + 12)) for start in (40, 900, 3000)}
    for name, prompt in prompts.items():
        worker.submit(GenerationRequest(request=name, prompt=prompt, max_new_tokens=16))
    texts: dict[str, list[int]] = {}
    while len(texts) < len(prompts):
        for event in worker.next_events(1.0):
            texts[event.request] = list(event.tokens)
    counters = worker.status().cache
    worker.stop()
    for name, prompt in prompts.items():
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        assert texts[name] == plain.tolist()
    assert counters["prefetch_used"] > 0
