"""The bench beside FreeToken without FreeToken and without a GPU: our side, and what is done with the other cache, on a
plain LRU in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from placement.trace import RoutingTrace
from scripts.bench import beside_freetoken, freetoken_shape, freetoken_sides, freetoken_trace
from scripts.bench.freetoken_sides import BANKS, Ours, Rival, banks_of
from scripts.bench.offload import CUDA, Bench

pytestmark = pytest.mark.skipif(CUDA, reason="the bench itself runs there")


class PlainLru:
    """What is asked of FreeToken's cache, in plain loops: one LRU over all layers, ids become slots."""

    def __init__(self, bench: Bench, banks: dict[str, list[torch.Tensor]], num_slots: int) -> None:
        self.num_experts, self.cache_size = bench.trace.num_experts, num_slots
        self.slot_for_id = torch.full((bench.trace.num_layers, self.num_experts), -1, dtype=torch.int32)
        self.id_of_slot = torch.full((num_slots,), -1, dtype=torch.int32)
        self.usage = torch.zeros(num_slots, dtype=torch.int64)
        self.step = torch.zeros((), dtype=torch.int64)
        self.lru_stats = torch.zeros((bench.trace.num_layers, 3), dtype=torch.int64)
        self.collect_stats = False
        self.bank_caches = {bank: torch.zeros((num_slots, *banks[bank][0].shape[1:])) for bank in BANKS}
        self._banks = banks
        self._missing: list[tuple[int, int, int]] = []

    def ensure_experts(self, layer: int, ids: torch.Tensor) -> None:
        assert ids.dtype == torch.int32 and ids.is_contiguous()
        self.step += 1
        where, needed = self.slot_for_id[layer], sorted(set(ids.flatten().tolist()))
        missing = [expert for expert in needed if where[expert] < 0]
        self.usage[where[[expert for expert in needed if where[expert] >= 0]].long()] = self.step
        self._missing = []
        for expert in missing:
            slot = int(self.usage.argmin())
            if self.id_of_slot[slot] >= 0:
                self.slot_for_id.view(-1)[self.id_of_slot[slot]] = -1
            self.id_of_slot[slot], where[expert] = layer * self.num_experts + expert, slot
            self.usage[slot] = self.step
            self._missing.append((layer, expert, slot))
        ids.copy_(where[ids.long()])
        if self.collect_stats:
            self.lru_stats[layer] += torch.tensor([len(needed), len(missing), 1])

    def copy_missing(self) -> None:
        for layer, expert, slot in self._missing:
            for bank, slots in self.bank_caches.items():
                slots[slot] = self._banks[bank][layer][expert]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _trace(num_layers: int) -> RoutingTrace:
    """Twelve requests of 40 tokens; what a token uses is near what the one before it used."""
    tokens, rng = 480, np.random.default_rng(0)
    start = rng.integers(0, 64, (tokens // 4, num_layers)).repeat(4, axis=0)
    return RoutingTrace(
        num_experts=64,
        experts=((start[:, :, None] + 5 * np.arange(8)) % 64).astype(np.uint8),
        request=np.arange(tokens, dtype=np.int64) // 40,
        position=np.arange(tokens, dtype=np.int32) % 40,
        step=np.zeros(tokens, np.int64),
        source_rank=np.zeros(tokens, np.int32),
        phase=np.zeros(tokens, np.uint8),
    )


def test_without_a_gpu_it_says_what_it_needs_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["beside_freetoken.py", "--trace", "none.npz"])
    with pytest.raises(SystemExit) as ended:
        beside_freetoken.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "this bench needs CUDA and FreeToken 0.1.2, and torch finds no GPU here\n"


def test_of_its_benchmarks_shape_as_much_is_missing_as_is_asked_for_and_the_right_bytes_land(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(freetoken_shape, "BATCHES", (1, 4))
    bench = freetoken_shape.shape_bench(_trace(4))
    slots = freetoken_shape.slots_of_shape(bench)
    freetoken_shape.stage_shape(bench, Rival(PlainLru(bench, banks_of(bench), slots)))
    cases = [row for row in bench.rows if row["what"] == "its shape"]
    assert [(row["needed"], row["missing"]) for row in cases] == [
        (n, n * m // 4) for n in (8, 32) for m in (0, 1, 2, 4)
    ]
    assert all(row["moetis_ms"] > 0 and row["freetoken_ms"] > 0 for row in cases)
    sides = [row for row in bench.rows if row["what"] == "its shape, bytes in slots"]
    assert [(row["side"], row["experts"], row["wrong"]) for row in sides] == [("moetis", 32, 0), ("freetoken", 32, 0)]


def test_both_caches_see_the_same_steps_of_a_trace_and_hold_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freetoken_trace, "STEPS", {2: (3, 4)})
    monkeypatch.setattr(freetoken_trace, "SHARES", (0.5,))
    monkeypatch.setattr(freetoken_trace, "freetoken_cache", PlainLru)
    bench = Bench(_trace(2))
    freetoken_trace.stage_trace(bench, banks_of(bench), end=float("inf"))
    rows = [row for row in bench.rows if row["what"] in ("moetis", "freetoken")]
    assert [(row["what"], row["policy"]) for row in rows] == [
        ("moetis", "fresh"),
        ("moetis", "learned"),
        ("freetoken", "lru"),
    ]
    assert all(row["wrong"] == 0 and 0 < row["hit_rate"] < 1 and row["bound_ms"] > 0 for row in rows)
    assert all(row["error"] < 1e-5 for row in rows[:2])
    shown = beside_freetoken.table(rows, beside_freetoken.TRACE).splitlines()
    assert len({len(line) for line in shown}) == 1 and shown[3].split()[-1] == "-"


def test_a_state_of_the_other_cache_comes_back_whole() -> None:
    bench = Bench(_trace(2))
    rival = Rival(PlainLru(bench, banks_of(bench), 64))
    rival.has(8)
    before = rival.state()
    rival.layer(0, torch.arange(16, dtype=torch.int32).view(2, 8))
    assert (0, 15) in rival.where()
    rival.restore(before)
    assert sorted(rival.where().items())[:9] == [((0, e), e) for e in range(8)] + [((1, 0), 8)]


def test_our_cache_holds_what_it_is_told_to() -> None:
    bench = freetoken_shape.shape_bench(_trace(4))
    ours = Ours(freetoken_shape.shape_cache(bench))
    items = sorted(bench.slab.experts())
    ours.has(items[: ours.cache.num_slots])
    ours.has(items[-ours.cache.num_slots :])
    assert sorted(ours.where()) == [(item.layer, item.expert) for item in items[-ours.cache.num_slots :]]
    assert freetoken_sides.num_wrong(bench, bench.layout.views(ours.cache.slots), ours.where()) == 0
    ours.cache.close()
