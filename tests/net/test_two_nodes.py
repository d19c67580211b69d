"""Two nodes with addresses of their own, a bridge and a slow link between them: experts move, the link is cut, and it
comes back. Network namespaces and `tc tbf`; Ray and gloo run across them as across machines."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster.verify import plain_texts
from tests.e2e.running import DEMO_OPTIONS, Serving, demo_like_config, moetis, own_environment

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]

RAY = str(Path(sys.executable).parent / "ray")
PORT = 6399
ADDRESS = ("10.77.0.1", "10.77.0.2")
LINK = ("rate", "100mbit", "burst", "64kb", "latency", "50ms")
# A node that can't be reached is dead for Ray after about four seconds, not after a minute.
HEALTH = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
PROMPTS = ["def read(path):\n    with open(path) as", "Um ein neues Dokument zu öffnen, wählen Sie"]
NEW = 60


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """Namespaces for two nodes, and one with the bridge between them; the link to each node is slow."""

    def __init__(self) -> None:
        name = f"moetis{secrets.token_hex(2)}"
        self.nodes = (f"{name}a", f"{name}b")
        self._switch = f"{name}s"
        try:
            _ip("netns", "add", self._switch)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        self._in_switch("ip", "link", "add", "name", "bridge0", "type", "bridge")
        self._in_switch("ip", "link", "set", "bridge0", "up")
        for number, node in enumerate(self.nodes):
            port = f"port{number}"
            _ip("netns", "add", node)
            self._in_switch("ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", node)
            self._in_switch("ip", "link", "set", port, "master", "bridge0", "up")
            self._in_switch("tc", "qdisc", "add", "dev", port, "root", "tbf", *LINK)
            for command in (
                ("addr", "add", f"{ADDRESS[number]}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", node, *command)

    def _in_switch(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self._switch, *command], check=True, capture_output=True)

    def inside(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.nodes[number])

    def link(self, number: int, state: str) -> None:
        self._in_switch("ip", "link", "set", f"port{number}", state)

    def end(self) -> None:
        for name in (*self.nodes, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Nodes:
    """Ray on both nodes, with token authentication and a label each."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._network = network
        self._temp = Path("/tmp") / f"moetis-{secrets.token_hex(4)}"
        self._log = (folder / "nodes").open("w")
        token = folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        self._environment = own_environment(folder) | self.variables | {"RAY_worker_niceness": "0"}
        del self._environment["RAY_ADDRESS"]
        self._families: list[psutil.Process] = []
        head = ("--head", f"--port={PORT}", f"--temp-dir={self._temp}", "--include-dashboard=false")
        self._start(0, *head, f"--system-config={json.dumps(HEALTH)}")
        # The other node finds the head only once it listens.
        _wait_until(lambda: self._reaches_head(), "Ray's head does not listen", 60)
        self.join()

    def _reaches_head(self) -> bool:
        probe = f"import socket; socket.create_connection(('{ADDRESS[0]}', {PORT}), 2)"
        done = subprocess.run([*self._network.inside(1), sys.executable, "-c", probe], capture_output=True, check=False)
        return done.returncode == 0

    def join(self) -> None:
        """Start Ray on the second node."""
        self._start(1, f"--address={ADDRESS[0]}:{PORT}")

    def _start(self, number: int, *options: str) -> None:
        command = [
            *(*self._network.inside(number), RAY, "start", "--block", f"--node-ip-address={ADDRESS[number]}"),
            *(*options, "--num-cpus=1", f"--object-store-memory={96 * 10**6}", f"--labels=moetis/node=n{number}"),
        ]
        process = subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)
        self._families.append(psutil.Process(process.pid))

    def end(self) -> None:
        for top in self._families:
            if top.is_running():
                family = [top, *top.children(recursive=True)]
                top.send_signal(signal.SIGTERM)
                _, alive = psutil.wait_procs(family, timeout=15)
                for process in alive:
                    process.kill()
        self._log.close()
        shutil.rmtree(self._temp, ignore_errors=True)


def _wait_until(true: Callable[[], bool], what: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    return tmp_path_factory.mktemp("net")


@pytest.fixture(scope="module")
def network(folder: Path) -> Iterator[Network]:
    made = Network()
    yield made
    made.end()


@pytest.fixture(scope="module")
def nodes(folder: Path, network: Network) -> Iterator[Nodes]:
    started = Nodes(folder, network)
    yield started
    started.end()


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return demo_like_config(
        folder,
        topology="2x1",
        slots_per_rank=20,
        ray={"address": f"{ADDRESS[0]}:{PORT}", "node_labels": [{"moetis/node": "n0"}, {"moetis/node": "n1"}]},
        workers={"host": "auto", "interface": "eth0"},
        faults={"heartbeat_s": 0.5, "dead_after_s": 4.0},
    )


@pytest.fixture(scope="module")
def serving(folder: Path, network: Network, nodes: Nodes, config: Path) -> Iterator[Serving]:
    running = Serving(folder, config, inside=network.inside(0), environment=nodes.variables)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return plain_texts(DEMO_OPTIONS, [(prompt, NEW) for prompt in PROMPTS])


def _send(serving: Serving, phase: str, number: int = 8) -> list[str]:
    names = [f"{phase}-{index}" for index in range(number)]
    serving.send(
        *(
            {"id": name, "prompt": PROMPTS[index % 2], "max_new_tokens": NEW, "stream": True}
            for index, name in enumerate(names)
        )
    )
    return names


def _check(serving: Serving, names: list[str], plain: list[str]) -> None:
    assert [serving.text(name) for name in names] == [plain[index % 2] for index in range(len(names))]


def test_experts_move_over_the_slow_link_under_load(
    serving: Serving, plain: list[str], folder: Path, config: Path, network: Network, nodes: Nodes
) -> None:
    _check(serving, _send(serving, "before", 16), plain)
    names = _send(serving, "during", 32)
    command = ("rebalance", "--config", str(config), "--json")
    done = moetis(folder, *command, inside=network.inside(0), environment=nodes.variables)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["decision"] == "applied"
    assert told["bytes"] > 0
    _check(serving, names, plain)


def test_a_node_that_is_cut_off_is_done_without_and_comes_back(
    serving: Serving, plain: list[str], network: Network, nodes: Nodes
) -> None:
    names = _send(serving, "cut")
    _wait_until(lambda: serving._ended(names[0]) or names[0] in serving.answers, "no stream began", 60)
    network.link(1, "down")
    _check(serving, names, plain)
    assert "seat 1 was lost" in serving.stderr()
    _check(serving, _send(serving, "alone"), plain)
    network.link(1, "up")
    nodes.join()
    _wait_until(lambda: "seat 1 is taken again" in serving.stderr(), "seat 1 stays empty", 200)
    _check(serving, _send(serving, "again"), plain)
