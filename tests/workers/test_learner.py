"""A policy that learns in a thread of its own: whoever asks it anything gets what it knows by then."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from placement.cache.policy import Candidates, EvictionPolicy, PolicyName
from workers import learner as learner_module
from workers.learner import Learner

LAYERS, EXPERTS, SLOTS = 3, 8, 10


def _policy() -> EvictionPolicy:
    return EvictionPolicy(PolicyName.REUSE, num_layers=LAYERS, num_experts=EXPERTS, top_k=2, share=0.4)


def _runs(count: int) -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng(count)
    return [(clock % LAYERS, np.sort(rng.permutation(EXPERTS)[:2])) for clock in range(count)]


def _candidates() -> Candidates:
    layers, experts = np.divmod(np.arange(SLOTS) * 2, EXPERTS)
    return Candidates(layers, experts, np.ones(SLOTS, bool), 3)


def test_whoever_asks_waits_until_what_was_begun_is_learned() -> None:
    plain, policy = _policy(), _policy()
    learner = Learner(policy)
    layers, experts_in, _, _ = _candidates()
    for ask in (
        lambda each: each.values(layers, experts_in).tolist(),
        lambda each: each.chances(1).tolist(),
        lambda each: each.observe(0, np.arange(2)),
    ):
        for _ in range(100):
            learner.begin(_runs(LAYERS), _candidates())
            expected = plain.learn(_runs(LAYERS), _candidates())
        assert ask(learner) == ask(plain)
        assert learner.ranked() == expected
    learner.begin(_runs(LAYERS))
    plain.learn(_runs(LAYERS))
    assert learner.rank(_candidates()) == plain.rank(*_candidates())
    learner.close()


def test_what_is_begun_is_learned_in_its_order() -> None:
    plain, policy = _policy(), _policy()
    learner = Learner(policy)
    for count in (3, 1, 2):
        learner.begin(_runs(count))
        plain.learn(_runs(count))
    learner.wait()
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(policy.memory, plain.memory, strict=True))
    learner.close()


def test_it_idles_once_it_has_learned() -> None:
    learner = Learner(_policy())
    assert learner.is_idle()
    learner.begin(_runs(2))
    until = time.monotonic() + 60
    while not learner.is_idle():
        assert time.monotonic() < until
    learner.close()
    assert learner.is_idle() and learner.ranked() == []


def test_more_slots_than_before_are_ranked_too() -> None:
    plain, policy = _policy(), _policy()
    learner = Learner(policy)
    learner.begin(_runs(2), _candidates())
    plain.learn(_runs(2))
    num_slots = 5 * LAYERS * EXPERTS
    layers, experts = np.divmod(np.arange(num_slots) % (LAYERS * EXPERTS), EXPERTS)
    many = Candidates(layers, experts, np.ones(num_slots, bool), num_slots)
    learner.begin(_runs(3), many)
    assert learner.ranked() == plain.learn(_runs(3), many)
    learner.close()


def test_the_thread_ends_with_a_learner_that_nobody_closed() -> None:
    gc.collect()  # What other tests left.
    before, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    learner = Learner(_policy())
    learner.begin(_runs(3))
    learner.wait()
    del learner
    gc.collect()
    assert threading.active_count() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_who_was_interrupted_while_it_waited_waits_again_without_hanging() -> None:
    learner = Learner(_policy())
    learner.begin(_runs(2))
    learner.wait()
    learner._under_way = True  # As if an interrupt came before it was noted.
    learner.begin(_runs(2), _candidates())
    assert len(learner.ranked()) == 3
    learner.close()


def test_what_began_before_an_interrupt_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(_policy())
    learner.begin(_runs(2))
    learner.wait()
    write = os.write

    def interrupted(file: int, message: bytes) -> int:
        write(file, message)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "write", interrupted)
        learner.begin(_runs(3))
    learner.wait()
    assert learner._beside is not None and learner._beside.has_learned()
    with pytest.raises(BlockingIOError):
        os.read(learner._beside._told, 1)
    learner.close()


def test_who_waits_for_a_thread_that_has_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "serve", lambda *arguments: None)
    learner = Learner(_policy())
    learner.begin(_runs(2))
    with pytest.raises(RuntimeError, match="has ended"):
        learner.wait()


def test_the_thread_ends_though_a_forked_process_has_its_pipes_open() -> None:
    learner = Learner(_policy())
    learner.begin(_runs(2))
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    begun = time.monotonic()
    learner.close()
    assert time.monotonic() - begun < 10
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_process_ends_by_itself_while_its_thread_waits_or_learns_and_a_fork_does_not_end_it() -> None:
    script = """
import os
from tests.workers.test_learner import _candidates, _policy, _runs
from workers.learner import Learner

learner = Learner(_policy())
learner.begin(_runs(3), _candidates())
learner.wait()
if os.fork() == 0:
    raise SystemExit
os.wait()
learner.begin(_runs(3), _candidates())
assert len(learner.ranked()) == 3
learner.begin(_runs(3), _candidates())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_signal_does_not_end_the_thread() -> None:
    learner = Learner(_policy())
    learner.begin(_runs(1))
    learner.wait()
    thread = next(thread for thread in threading.enumerate() if thread.name == "learner")
    assert thread.ident is not None
    seen: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        for _ in range(20):
            signal.pthread_kill(thread.ident, signal.SIGUSR1)
            learner.begin(_runs(2))
            learner.wait()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert seen
    learner.close()


def test_the_thread_begins_when_it_is_needed_and_ends() -> None:
    gc.collect()  # What other tests left.
    before = threading.active_count()
    learner = Learner(_policy())
    learner.observe(0, np.arange(2))
    assert threading.active_count() == before
    learner.begin(_runs(3))
    assert threading.active_count() == before + 1
    learner.close()
    assert threading.active_count() == before
