"""`moetis serve` while its parts are killed, as its users see it: real Ray, real processes, kill -9."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.history import History
from cluster.verify import plain_texts
from tests.e2e.running import DEMO_OPTIONS, Serving, demo_like_config, moetis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [
    "def read(path):\n    with open(path) as",
    "package main\n\nfunc main() {\n",
    "Um ein neues Dokument zu öffnen, wählen Sie",
    "Para abrir un archivo, seleccione",
]
NEW = 100


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return demo_like_config(folder, faults={"dead_after_s": 4.0, "heartbeat_s": 0.5})


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What the plain model writes."""
    return plain_texts(DEMO_OPTIONS, [(prompt, NEW) for prompt in PROMPTS])


def _actors(serving: Serving, kind: str) -> list[psutil.Process]:
    found = []
    for process in serving.family():
        try:
            if f"ray::{kind}" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _send(serving: Serving, phase: str) -> list[str]:
    names = [f"{phase}-{number}" for number in range(16)]
    serving.send(
        *(
            {"id": name, "prompt": PROMPTS[number % 4], "max_new_tokens": NEW, "stream": number % 2 == 0}
            for number, name in enumerate(names)
        )
    )
    return names


def _wait_until(ready: Any, what: str, within_s: float = 200) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _check(serving: Serving, names: list[str], plain: list[str]) -> None:
    answers = serving.wait_for(*names)
    assert {answers[name][-1]["end"] for name in names} == {"finished"}
    assert [serving.text(name) for name in names] == [plain[number % 4] for number in range(len(names))]


def _full_again(serving: Serving, number: int) -> None:
    """Until the ranks have formed with every seat taken, `number` times since the start."""
    _wait_until(lambda: serving.stderr().count("is taken again") >= number, serving.stderr())


def _lose(serving: Serving, how: int, phase: str, plain: list[str]) -> None:
    victim = _actors(serving, "WorkerActor")[1]
    names = _send(serving, phase)
    _wait_until(lambda: serving._ended(names[0]) or names[0] in serving.answers, "no stream began")
    victim.send_signal(how)
    _check(serving, names, plain)
    _wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, "it is still there")


def test_a_worker_that_is_killed_costs_nobody_a_token(serving: Serving, plain: list[str]) -> None:
    _lose(serving, signal.SIGKILL, "killed", plain)
    assert "was lost" in serving.stderr()
    _full_again(serving, 1)
    _check(serving, _send(serving, "after"), plain)


def test_a_worker_that_hangs_is_taken_for_dead(serving: Serving, plain: list[str]) -> None:
    _lose(serving, signal.SIGSTOP, "hung", plain)
    _full_again(serving, 2)


def test_a_killed_service_comes_back_with_the_epoch_that_serves(
    serving: Serving, plain: list[str], folder: Path, config: Path
) -> None:
    before = History(folder / "run" / "history.sqlite").served()
    assert before is not None
    (service,) = _actors(serving, "PlacementServiceActor")
    names = _send(serving, "beside")
    service.kill()
    _check(serving, names, plain)
    _wait_until(lambda: len(_actors(serving, "PlacementServiceActor")) == 1, "the service did not come back")
    done = moetis(folder, "rebalance", "--config", str(config), "--json", timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epoch_before"] == before.placement.epoch


def test_a_seat_is_drained_and_taken_again(serving: Serving, plain: list[str], folder: Path, config: Path) -> None:
    names = _send(serving, "draining")
    done = moetis(folder, "scale", "--config", str(config), "--drain", "3", "--json", timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"seats": [0, 1, 2]}
    _check(serving, names, plain)
    _check(serving, _send(serving, "three"), plain)
    done = moetis(folder, "scale", "--config", str(config), "--add", "3", "--json", timeout_s=300)
    assert json.loads(done.stdout) == {"seats": [0, 1, 2, 3]}
    _check(serving, _send(serving, "four"), plain)


def test_seats_that_do_not_exist_are_refused(serving: Serving, folder: Path, config: Path) -> None:
    done = moetis(folder, "scale", "--config", str(config), "--drain", "7")
    assert done.returncode == 2
    assert "name seats from 0 to 3" in done.stderr


def test_at_the_end_nothing_is_left(serving: Serving) -> None:
    family = serving.family()
    assert serving.end() == 0
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
