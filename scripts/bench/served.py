"""What the benchmarks of a cluster that serves share: the demo behind its gateway, clients that stream, and a stamp.

The cluster is a process of its own, as operators start it; what happens to it meanwhile is done from outside.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import psutil
import yaml

from cluster.config import ClusterConfig, load_config
from cluster.crew import ACTOR_TITLE
from cluster.demo import load_prompts
from cluster.demo_run import DEMO_CONFIG, DEMO_PROMPTS
from cluster.local_ray import CONTACT_FILE
from placement.errors import MoetisError

ROOT = Path(__file__).resolve().parents[2]
READY_S, END_S = 300.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A text to write: the prompt and how many tokens."""

    name: str
    prompt: str
    tokens: int


@dataclass(slots=True)
class Told:
    """What a client was told of a wish: pieces of text and the moment of each, how many tokens, or what went wrong."""

    wish: Wish
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    moments: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Served:
    """The demo cluster behind its gateway."""

    def __init__(self, config: ClusterConfig, process: subprocess.Popen[bytes], port: int) -> None:
        self.config = config
        self.process = process
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=READY_S
        )

    def family(self) -> list[psutil.Process]:
        """The serving process and all that came from it."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        return [process for process in self.family() if _title(process).startswith(ACTOR_TITLE)]

    def write(self, wish: Wish) -> Told:
        """One streamed completion, greedy."""
        told = Told(wish)
        try:
            pieces = self.client.completions.create(
                model="demo",
                prompt=wish.prompt,
                max_tokens=wish.tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            for piece in pieces:
                if piece.usage is not None:
                    told.tokens = piece.usage.completion_tokens
                if piece.choices and piece.choices[0].text:
                    told.pieces.append(piece.choices[0].text)
                    told.moments.append(time.monotonic())
        except openai.APIError as error:
            told.error = f"{type(error).__name__}: {error}"
        return told


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@contextmanager
def served_demo(folder: Path, **changes: Any) -> Iterator[Served]:
    """`moetis serve --http` of the demo's cluster, with changes to its configuration, until the context ends."""
    raw = yaml.safe_load(DEMO_CONFIG.read_text())
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(raw | {"run_dir": str(folder / "run")} | changes))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "cluster", "serve", "--config", str(path), "--http", f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        served = Served(load_config(path), process, port)
        _wait_until_ready(served)
        yield served
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(END_S)


def _wait_until_ready(served: Served) -> None:
    """Until other commands find the cluster, which is when its gateway answers."""
    deadline = time.monotonic() + READY_S
    while not (served.config.run_dir / CONTACT_FILE).exists():
        if served.process.poll() is not None or time.monotonic() > deadline:
            raise MoetisError(f"the cluster did not come up within {READY_S:.0f} s")
        time.sleep(0.2)


class Others:
    """How many cores other programs of the machine took meanwhile, by the scheduler's own account: figures are worth
    what is left of them. What is neither this process's nor the cluster's is another's."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.cores = 0.0

    def __enter__(self) -> Others:
        self._start, self._before = time.monotonic(), self._run_s()
        return self

    def __exit__(self, *error: object) -> None:
        ran = self._run_s()
        # One that came and went between the two looks is not seen, nor is one of ours that was killed.
        spent = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in ran.items())
        self.cores = spent / (time.monotonic() - self._start)

    def _run_s(self) -> dict[int, float]:
        """Seconds that each other process has run, all of its threads together."""
        ours = {os.getpid(), *(process.pid for process in self._served.family())}
        found = {}
        for pid in psutil.pids():
            if pid not in ours:
                with contextlib.suppress(OSError):
                    tasks = Path(f"/proc/{pid}/task").iterdir()
                    found[pid] = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        return found


class Crowd:
    """Clients, each with one wish at a time, until there are no more. told grows as wishes end."""

    def __init__(self, served: Served, wishes: Iterable[Wish], *, at_a_time: int) -> None:
        self._served = served
        self._wishes = iter(wishes)
        self._lock = threading.Lock()
        self.told: list[Told] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(at_a_time)]

    def _run(self) -> None:
        while (wish := self._next()) is not None:
            self.told.append(self._served.write(wish))

    def _next(self) -> Wish | None:
        with self._lock:
            return next(self._wishes, None)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def demo_prompts(config: ClusterConfig) -> list[str]:
    return [prompt.text for prompt in load_prompts(DEMO_PROMPTS, config.model, 100)]


def stamp() -> dict[str, str]:
    """When, where and of what code figures are."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "commit": commit}
