"""A `moetis` process under test: its own HOME, temp dir and run_dir, its lines, and what it leaves behind."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from workers.options import RecorderOptions, WorkerOptions

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
DEMO_OPTIONS = WorkerOptions(model=ROOT / "configs" / "models" / "demo", recorder=RecorderOptions(folder=None))


def own_environment(folder: Path) -> dict[str, str]:
    """Nothing of this user's Ray is seen or touched: HOME and TMPDIR are the test's."""
    for name in ("home", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "RAY_ADDRESS": "10.255.255.1:6379"}


def moetis(
    folder: Path,
    *arguments: str,
    timeout_s: float = TIMEOUT_S,
    inside: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """inside: the start of a command line that runs the rest of it somewhere else."""
    return subprocess.run(
        [*inside, sys.executable, "-m", "cluster", *arguments],
        cwd=ROOT,
        env=own_environment(folder) | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def demo_like_config(folder: Path, **changes: Any) -> Path:
    """The demo's cluster file with this run_dir."""
    raw = yaml.safe_load((ROOT / "configs" / "clusters" / "demo.yaml").read_text())
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(raw | {"run_dir": str(folder / "run")} | changes))
    return path


class Serving:
    """`moetis serve` as a process: write lines, wait for answers. options: more of the command line."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        *options: str,
        ready: str = "requests on stdin",
        environment: dict[str, str] | None = None,
        within_s: float = TIMEOUT_S,
        inside: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._errors = (folder / "stderr").open("w")
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "cluster", "serve", "--config", str(config), *options],
            cwd=ROOT,
            env=own_environment(folder) | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.answers: dict[str | None, list[dict[str, Any]]] = {}
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._wait(lambda: ready in self.stderr(), "the cluster did not come up", within_s)
        except BaseException:
            self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def send(self, *wishes: dict[str, Any] | str) -> None:
        assert self.process.stdin is not None
        for wish in wishes:
            self.process.stdin.write((wish if isinstance(wish, str) else json.dumps(wish)) + "\n")
        self.process.stdin.flush()

    def wait_for(self, *names: str | None) -> dict[str | None, list[dict[str, Any]]]:
        """All lines of these requests, once each has ended."""
        self._wait(lambda: all(self._ended(name) for name in names), f"no end of {names}")
        return {name: self.answers[name] for name in names}

    def text(self, name: str) -> str:
        return "".join(line["text"] for line in self.wait_for(name)[name])

    def _ended(self, name: str | None) -> bool:
        while not self._lines.empty():
            line = json.loads(self._lines.get())
            self.answers.setdefault(line["id"], []).append(line)
        return any("end" in line for line in self.answers.get(name, []))

    def _wait(self, ready: Any, otherwise: str, within_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + within_s
        while not ready():
            assert self.process.poll() is None or ready(), f"{otherwise}: serve ended\n{self.stderr()}"
            assert time.monotonic() < deadline, f"{otherwise}\n{self.stderr()}"
            time.sleep(0.05)

    def ray_folder(self) -> Path:
        """The temp dir of the cluster's Ray."""
        contact = json.loads((self._folder / "run" / "cluster.json").read_text())
        return Path(contact["token_path"]).parent

    def family(self) -> list[psutil.Process]:
        """The serving process and every process that came from it."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def end(self, how: int | None = None) -> int:
        """Close stdin, or send a signal; the exit status."""
        if how is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
        else:
            self.process.send_signal(how)
        return self.process.wait(timeout=TIMEOUT_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(timeout=TIMEOUT_S)
        self._errors.close()


def still_alive(family: list[psutil.Process], within_s: float = 20) -> list[str]:
    """Those of the family that are not gone after a while."""
    _, alive = psutil.wait_procs(family, timeout=within_s)
    return [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in alive]
