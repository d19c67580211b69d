"""More experts than host memory holds: what is away comes when it is needed, and what can't be read fails alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cache.policy import EvictionPolicy, PolicyName
from placement.core import ExpertId
from placement.errors import ConfigError, DiskError, MigrationError
from workers.blob import BlobLayout
from workers.disk_tier import BlobFile, DiskTier
from workers.links import Arrival, DirectLink, Fence, Pair
from workers.shards import open_shards
from workers.slot_cache import SlotCache
from workers.tiered_slab import TieredSlab

BLOB, ROWS = 512, 6
DEMO = Path(__file__).parents[2] / "configs" / "models" / "demo"


class Numbers:
    """Experts whose every byte is their number; `broken` ones can't be read."""

    layout = BlobLayout(fields=(), num_bytes=BLOB)
    lasts = True

    def __init__(self) -> None:
        self.broken: set[int] = set()

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        if expert.expert in self.broken:
            raise OSError("Input/output error")
        out.fill_(expert.expert)


def _slab(disk: DiskTier, owned: int = 10, capacity: int = 40) -> TieredSlab:
    slab = TieredSlab(rows=ROWS, capacity=capacity, blob_bytes=BLOB, disk=disk)
    for number in range(owned):
        slab.add(ExpertId(0, number), torch.full((BLOB,), number, dtype=torch.uint8))
    return slab


def _fetch(slab: TieredSlab, numbers: list[int]) -> list[int | None]:
    """The numbers that are found in the blobs."""
    experts = [ExpertId(0, number) for number in numbers]
    blobs = slab.fetch(experts)
    found = [None if blob is None else int(blob.unique()) for blob in blobs]
    here = [expert for expert, blob in zip(experts, blobs, strict=True) if blob is not None]
    slab.lent(here, DirectLink().copy([], after=None, urgent=True))
    return found


def test_all_that_is_owned_counts_and_can_be_had() -> None:
    slab = _slab(DiskTier(source=Numbers(), file=None))
    assert slab.experts() == {ExpertId(0, number) for number in range(10)}
    assert _fetch(slab, [0, 9, 3]) == [0, 9, 3]
    assert slab.figures()["experts_on_disk"] == 4
    assert slab.figures()["disk_bytes"] == slab.figures()["disk_reads"] * BLOB > 0


def test_what_is_needed_often_stays_in_memory() -> None:
    slab = _slab(DiskTier(source=Numbers(), file=None))
    for turn in range(8):
        _fetch(slab, [0, 1, 2 + turn])
    reads = slab.figures()["disk_reads"]
    _fetch(slab, [0, 1])
    assert slab.figures()["disk_reads"] == reads


@pytest.mark.parametrize("broken", [set(), {3}, {1, 4, 9}, set(range(10))])
@pytest.mark.parametrize("num_slots", [1, 3, 12])
def test_waves_lack_just_what_cannot_be_read(broken: set[int], num_slots: int) -> None:
    source = Numbers()
    slab = TieredSlab(rows=ROWS, capacity=40, blob_bytes=BLOB, disk=DiskTier(source=source, file=None))
    for number in range(10):
        slab.add_away(ExpertId(0, number))
    source.broken = broken
    cache = SlotCache(
        slab=slab,
        policy=EvictionPolicy(PolicyName.LRU, num_layers=1, num_experts=10, top_k=2, share=0.3),
        link=DirectLink(),
        num_slots=num_slots,
        blob_bytes=BLOB,
        device=torch.device("cpu"),
        landing_group=2,
    )
    served = []
    for wave in cache.waves(0, np.arange(10)):
        for expert in wave.experts:
            assert cache.slots[wave.slots[expert]].eq(expert).all()
            served.append(expert)
    assert sorted(served) == sorted(set(range(10)) - broken)
    assert set(cache.take_lost()) == broken
    assert cache.take_lost() == []


def test_a_file_of_blobs_has_no_name_and_gives_back_what_was_written(tmp_path: Path) -> None:
    slab = _slab(DiskTier(source=None, file=BlobFile(tmp_path, BLOB)))
    assert list(tmp_path.iterdir()) == []
    for number in range(10):
        assert _fetch(slab, [number]) == [number]


def test_an_expert_that_cannot_be_read_is_missed_alone_and_comes_back_with_the_disk() -> None:
    source = Numbers()
    slab = _slab(DiskTier(source=source, file=None))
    away = next(number for number in range(10) if not slab.is_ready(ExpertId(0, number)))
    source.broken = {away}
    assert _fetch(slab, [9, away, 8]) == [9, None, 8]
    assert slab.figures()["disk_failures"] == 1
    with pytest.raises(DiskError, match=r"cannot be read from disk, tried 2 times: Input/output error"):
        slab.blob(ExpertId(0, away))
    source.broken = set()
    assert _fetch(slab, [away]) == [away]


def test_a_file_that_fails_is_helped_out_by_the_checkpoint(tmp_path: Path) -> None:
    file = BlobFile(tmp_path, BLOB)
    slab = _slab(DiskTier(source=Numbers(), file=file))
    os.ftruncate(file._file.fileno(), 0)
    assert [_fetch(slab, [number]) for number in range(10)] == [[number] for number in range(10)]


def test_a_rank_that_owns_all_it_may_refuses_more() -> None:
    slab = _slab(DiskTier(source=Numbers(), file=None), owned=10, capacity=10)
    assert slab.num_free == 0
    with pytest.raises(MigrationError, match="may own 10 experts, in memory and on disk"):
        slab.claim(ExpertId(0, 30))


def test_a_promoted_expert_is_ready_without_being_asked_for() -> None:
    slab = _slab(DiskTier(source=Numbers(), file=None))
    away = next(expert for expert in sorted(slab.experts()) if not slab.is_ready(expert))
    slab.promote([away])
    slab._pool.shutdown(wait=True)
    assert slab.is_ready(away)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["fetch", "release", "add"]), st.sets(st.integers(0, 14), max_size=4))))
def test_every_blob_is_its_own_whatever_comes_and_goes(steps: list[tuple[str, set[int]]]) -> None:
    slab = _slab(DiskTier(source=Numbers(), file=None))
    owned = set(range(10))
    for what, numbers in steps:
        if what == "fetch":
            wanted = sorted(numbers & owned)
            assert _fetch(slab, wanted) == wanted
        for number in numbers if what == "release" else ():
            slab.release(ExpertId(0, number))
            owned.discard(number)
        for number in numbers - owned if what == "add" else ():
            slab.add(ExpertId(0, number), torch.full((BLOB,), number, dtype=torch.uint8))
            owned.add(number)
        assert {expert.expert for expert in slab.experts()} == owned
        assert slab.num_free == 40 - len(owned)


def test_a_checkpoint_that_loses_its_end_while_it_serves_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((DEMO / "model.safetensors").read_bytes())
    shards = open_shards(tmp_path)
    assert shards is not None
    key = next(key for key in shards.keys if key.endswith("layers.7.mlp.experts.31.down_proj.weight"))
    assert shards.whole(key).shape == (128, 64)
    os.truncate(path, 5000)
    with pytest.raises(ConfigError, match=rf"tensor '{key}' cannot be read: the file ends at byte \d+, \d+ bytes too"):
        shards.whole(key)


class _Lost:
    """A batch that failed on its way."""

    def wait(self) -> None:
        raise RuntimeError("a batch was lost")

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        self.wait()


def test_a_row_whose_copy_failed_is_used_again_like_any_other() -> None:
    slab = _slab(DiskTier(source=Numbers(), file=None))
    for number in range(10):
        expert = ExpertId(0, number)
        assert slab.fetch([expert]) != [None]
        slab.lent([expert], _Lost())
    assert _fetch(slab, list(range(ROWS))) == list(range(ROWS))


def test_a_link_that_refuses_copies_leaves_no_row_in_use() -> None:
    class Refusing(DirectLink):
        def copy(self, pairs: Sequence[Pair], *, after: Fence | None, urgent: bool) -> Arrival:
            raise RuntimeError("refused")

    slab = _slab(DiskTier(source=Numbers(), file=None))
    cache = SlotCache(
        slab=slab,
        policy=EvictionPolicy(PolicyName.LRU, num_layers=1, num_experts=10, top_k=2, share=0.4),
        link=Refusing(),
        num_slots=4,
        blob_bytes=BLOB,
        device=torch.device("cpu"),
    )
    for number in range(10):
        with pytest.raises(RuntimeError, match="refused"):
            list(cache.waves(0, np.array([number])))
    assert cache.resident(0) == frozenset()
    assert _fetch(slab, list(range(ROWS))) == list(range(ROWS))
