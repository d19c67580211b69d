"""The ring without a GPU: nothing is overwritten too early, nothing comes before its fence, nothing hangs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.bouncing import Gate, SoftEdge
from workers.bounce_ring import BounceRing, count_pieces, pieces_of
from workers.links import Pair

CHUNK = 64


def _pair(value: int, num_bytes: int = 10 * CHUNK + 7) -> Pair:
    return torch.zeros(num_bytes, dtype=torch.uint8), torch.full((num_bytes,), value, dtype=torch.uint8)


def _agree(pairs: list[Pair]) -> bool:
    return all(torch.equal(*pair) for pair in pairs)


def _random_delay(seed: int) -> Callable[[], None]:
    rng = random.Random(seed)
    return lambda: time.sleep(rng.choice([0, 0, 0, 0.0002, 0.001]))


def _fail_at(number: int) -> Callable[[], None]:
    """Raises at the call of this number, and at no other."""
    calls = iter(range(10**6))

    def fail() -> None:
        if next(calls) == number:
            raise OSError("the cable is out")

    return fail


@given(sizes=st.lists(st.integers(1, 40_000), max_size=4), chunk=st.sampled_from([1, 100, 4096, 16_384]))
def test_pieces_are_the_whole_of_every_blob_and_fit_a_chunk(sizes: list[int], chunk: int) -> None:
    sizes = [min(size, 500 * chunk) for size in sizes]
    pieces = list(pieces_of([_pair(1, size) for size in sizes], chunk))
    assert all(len(target) == len(source) <= chunk for target, source in pieces)
    assert sum(len(target) for target, _ in pieces) == sum(sizes)
    assert len(pieces) == sum(count_pieces(size, chunk) for size in sizes)


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_arrives_however_long_each_event_takes(seed: int) -> None:
    delay, rng = _random_delay(seed), random.Random(seed)
    edge = SoftEdge(num_chunks=rng.choice([1, 2, 5]), chunk_bytes=CHUNK, delay=delay)
    ring = BounceRing(edge, num_threads=rng.choice([1, 3, 8]), delay=delay)
    batches = [[_pair(value, rng.randint(1, 9 * CHUNK)) for _ in range(rng.randint(1, 3))] for value in range(1, 20)]
    arrivals = [ring.copy(batch, after=None) for batch in batches]
    for arrival, batch in zip(arrivals, batches, strict=True):
        arrival.wait()
        assert arrival.done()
        assert _agree(batch)
    ring.close()


def test_who_asks_goes_on_while_the_ring_is_full() -> None:
    gate, pair = Gate(), _pair(3)
    ring = BounceRing(SoftEdge(num_chunks=2, chunk_bytes=CHUNK), num_threads=2)
    begun = time.monotonic()
    arrival = ring.copy([pair], after=gate)
    assert time.monotonic() - begun < 1.0
    assert not arrival.done()
    gate.passed.set()
    arrival.finish()
    assert torch.equal(*pair)
    ring.close()


def test_nothing_is_written_before_its_fence() -> None:
    gate, (target, source) = Gate(), _pair(3)
    ring = BounceRing(SoftEdge(num_chunks=20, chunk_bytes=CHUNK), num_threads=2)
    arrival = ring.copy([(target, source)], after=gate)
    arrival.settle()
    time.sleep(0.02)
    assert not target.any()
    gate.passed.set()
    arrival.wait()
    assert torch.equal(target, source)
    ring.close()


def test_nothing_is_written_before_its_fence_even_where_the_first_piece_fails() -> None:
    gate, (target, source) = Gate(), _pair(3)
    ring = BounceRing(SoftEdge(num_chunks=20, chunk_bytes=CHUNK), num_threads=3, delay=_fail_at(0))
    arrival = ring.copy([(target, source)], after=gate)
    arrival.settle()
    time.sleep(0.02)
    assert not target.any()
    gate.passed.set()
    ring.close()


@pytest.mark.parametrize("number", [0, 1, 5, 10])
@pytest.mark.parametrize("where", ["a thread", "the edge"])
def test_a_failure_reaches_whoever_asks_for_the_batch_and_no_other(number: int, where: str) -> None:
    fail = _fail_at(number)
    edge = SoftEdge(num_chunks=2, chunk_bytes=CHUNK, fails=fail if where == "the edge" else lambda: None)
    ring = BounceRing(edge, num_threads=2, delay=fail if where == "a thread" else lambda: None)
    broken, whole = _pair(1), _pair(2)
    arrival = ring.copy([broken], after=None)
    arrival.settle()
    other = ring.copy([whole], after=None)
    for ask in (arrival.wait, arrival.finish, arrival.wait):
        with pytest.raises(RuntimeError, match="lost on their way through the bounce ring: the cable is out"):
            ask()
    assert arrival.done()
    other.wait()
    assert torch.equal(*whole)
    ring.wait_until_submitted()
    ring.close()


def test_no_thread_touches_a_batch_that_is_known_to_have_failed() -> None:
    slow, lock = threading.Event(), threading.Lock()
    calls = iter(range(100))

    def delay() -> None:
        with lock:
            number = next(calls)
        if number == 1:
            raise OSError("the cable is out")
        slow.wait(20.0)

    ring = BounceRing(SoftEdge(num_chunks=4, chunk_bytes=CHUNK), num_threads=2, delay=delay)
    arrival = ring.copy([_pair(1)], after=None)
    time.sleep(0.02)
    assert not arrival.done()
    slow.set()
    with pytest.raises(RuntimeError, match="the cable is out"):
        arrival.finish()
    ring.close()


def test_closing_a_busy_ring_lets_everything_land_and_ends_its_threads() -> None:
    edge = SoftEdge(num_chunks=2, chunk_bytes=CHUNK, delay=_random_delay(0))
    ring = BounceRing(edge, num_threads=3, delay=_random_delay(1))
    pairs = [_pair(value) for value in range(1, 9)]
    arrivals = [ring.copy([pair], after=None) for pair in pairs]
    ring.close()
    assert all(arrival.is_submitted() for arrival in arrivals)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bounce")]
    for arrival in arrivals:
        arrival.finish()
    assert _agree(pairs)
    with pytest.raises(RuntimeError):
        ring.copy([_pair(1)], after=None)


def test_a_ring_that_yields_begins_nothing_while_the_other_has_something_left() -> None:
    gate = Gate()
    urgent = SoftEdge(num_chunks=1, chunk_bytes=CHUNK)
    first = BounceRing(urgent, num_threads=1)
    edge = SoftEdge(num_chunks=2, chunk_bytes=CHUNK)
    second = BounceRing(edge, num_threads=1, yields_to=first)
    first.copy([_pair(1)], after=gate)
    patient = second.copy([_pair(2)], after=None)
    time.sleep(0.02)
    assert edge.num_sent == 0
    gate.passed.set()
    patient.finish()
    assert urgent.num_sent == 11
    first.close()
    second.close()


def test_what_goes_first_overtakes_between_two_chunks() -> None:
    overtaken, copied = Gate(), iter(range(100))
    first = BounceRing(SoftEdge(num_chunks=2, chunk_bytes=CHUNK), num_threads=2)
    slow = SoftEdge(num_chunks=2, chunk_bytes=CHUNK, delay=lambda: None if next(copied) < 3 else overtaken.finish())
    second = BounceRing(slow, num_threads=1, yields_to=first)
    (target, source), wanted = _pair(2), _pair(1)
    patient = second.copy([(target, source)], after=None)
    while not target[2 * CHUNK]:
        time.sleep(0.001)
    first.copy([wanted], after=None).finish()
    assert torch.equal(*wanted)
    assert not patient.done()
    overtaken.passed.set()
    patient.finish()
    assert torch.equal(target, source)
    first.close()
    second.close()


def test_what_goes_first_is_not_held_up_by_a_prefetch_whose_fence_is_not_reached() -> None:
    gate, wanted = Gate(), _pair(1)
    first = BounceRing(SoftEdge(num_chunks=2, chunk_bytes=CHUNK), num_threads=2)
    second = BounceRing(SoftEdge(num_chunks=2, chunk_bytes=CHUNK), num_threads=1, yields_to=first)
    patient = second.copy([_pair(2)], after=gate)
    time.sleep(0.02)
    first.copy([wanted], after=None).finish()
    assert torch.equal(*wanted)
    assert not patient.done()
    gate.passed.set()
    patient.finish()
    first.close()
    second.close()


def test_a_failure_in_the_ring_that_goes_first_does_not_hold_up_the_other() -> None:
    first = BounceRing(SoftEdge(num_chunks=1, chunk_bytes=CHUNK, fails=_fail_at(2)), num_threads=2)
    second = BounceRing(SoftEdge(num_chunks=1, chunk_bytes=CHUNK), num_threads=1, yields_to=first)
    lost, pair = first.copy([_pair(1)], after=None), _pair(2)
    second.copy([pair], after=None).finish()
    assert torch.equal(*pair)
    with pytest.raises(RuntimeError, match="the cable is out"):
        lost.wait()
    first.close()
    second.close()
