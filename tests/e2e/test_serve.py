"""`moetis serve` and `moetis rebalance` as their users run them: real Ray, real processes, gloo, the demo model."""

from __future__ import annotations

import ipaddress
import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.verify import plain_texts
from tests.e2e.running import DEMO_OPTIONS, Serving, demo_like_config, moetis, still_alive

pytestmark = pytest.mark.long

PROMPTS = [
    "def read(path):\n    with open(path) as",
    "import numpy as np\n\ndef mean(values):\n",
    "package main\n\nfunc main() {\n",
    "func add(a int, b int) int {\n",
    "Um ein neues Dokument zu öffnen, wählen Sie",
    "Klicken Sie auf die Schaltfläche, um die Tabelle",
    "Para abrir un archivo, seleccione",
    "Haga clic en el botón para insertar",
]
NEW = 24


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What the plain model writes."""
    return plain_texts(DEMO_OPTIONS, [(prompt, NEW) for prompt in PROMPTS])


def _wishes(phase: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"{phase}-{index}", "prompt": prompt, "max_new_tokens": NEW, **more}
        for index, prompt in enumerate(PROMPTS)
    ]


def _texts(serving: Serving, phase: str) -> list[str]:
    return [serving.text(f"{phase}-{index}") for index in range(len(PROMPTS))]


def test_the_texts_are_those_of_the_plain_model(serving: Serving, plain: list[str]) -> None:
    serving.send(*_wishes("first"))
    assert _texts(serving, "first") == plain


def test_a_stream_comes_in_pieces_that_make_up_the_text(serving: Serving, plain: list[str]) -> None:
    serving.send(*_wishes("stream", stream=True))
    assert _texts(serving, "stream") == plain
    assert len(serving.answers["stream-0"]) > NEW / 2


def test_a_bad_line_is_answered_and_the_others_go_on(serving: Serving, plain: list[str]) -> None:
    serving.send("nonsense", {"id": "no prompt"}, {"id": "empty", "prompt": ""}, *_wishes("beside"))
    found = serving.wait_for(None, "no prompt", "empty")
    assert "Invalid JSON" in found[None][0]["error"]
    assert "needs 'prompt' or 'cancel'" in found["no prompt"][0]["error"]
    assert "the prompt is empty" in found["empty"][0]["error"]
    assert _texts(serving, "beside") == plain


def test_a_cancelled_request_ends(serving: Serving) -> None:
    serving.send({"id": "long", "prompt": PROMPTS[0], "max_new_tokens": 1500, "stream": True}, {"cancel": "long"})
    assert serving.wait_for("long")["long"][-1]["end"] == "cancelled"


def test_experts_move_while_requests_are_served_and_the_texts_stay(
    serving: Serving, plain: list[str], folder: Path, config: Path
) -> None:
    for turn in range(6):
        serving.send(*_wishes(f"moving{turn}"))
    done = moetis(folder, "rebalance", "--config", str(config), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["decision"] == "applied"
    assert result["moves"] > 0
    assert result["measured"]["after"]["nodes_visited"] < result["measured"]["before"]["nodes_visited"]
    serving.send(*_wishes("moved"))
    for phase in [*(f"moving{turn}" for turn in range(6)), "moved"]:
        assert _texts(serving, phase) == plain


def test_top_shows_the_ranks_of_the_running_cluster(serving: Serving, folder: Path, config: Path) -> None:
    serving.send(*_wishes("top"))
    _texts(serving, "top")
    done = moetis(folder, "top", "--config", str(config), "--once", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert {rank["epoch"] for rank in found["ranks"]} == {found["epoch"]}
    assert 0 < found["nodes_visited"] <= 1
    assert found["nodes_visited"] <= found["ranks_visited"] <= 3
    assert found["load_max_over_mean"] >= 1
    assert 0 < found["cache_hit_rate"] <= 1
    assert (found["progress"], found["problem"]) == ("idle", None)


def test_tokens_go_before_planning_and_behind_nothing(serving: Serving) -> None:
    niceness: dict[str, set[int]] = {"ray::WorkerActor": set(), "ray::PlacementServiceActor": set()}
    for process in serving.family():
        title = " ".join(process.cmdline())
        for kind, found in niceness.items():
            if title.startswith(kind):
                found.add(process.nice())
    (own,) = niceness["ray::WorkerActor"]
    assert own <= max(0, serving.family()[0].nice())
    assert niceness["ray::PlacementServiceActor"] == {own + 10}


def test_nothing_listens_beyond_loopback(serving: Serving) -> None:
    open_to_all = {
        (process.name(), connection.laddr.ip)
        for process in serving.family()
        for connection in process.net_connections(kind="inet")
        if connection.status == "LISTEN"
        and not ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:")).is_loopback
    }
    assert open_to_all == set()


def test_at_the_end_of_stdin_it_answers_what_runs_and_leaves_nothing(
    serving: Serving, plain: list[str], folder: Path
) -> None:
    family, ray_folder = serving.family(), serving.ray_folder()
    serving.send(*_wishes("last"))
    assert serving.end() == 0
    assert [serving.text(f"last-{index}") for index in range(len(PROMPTS))] == plain
    assert still_alive(family) == []
    assert not ray_folder.exists()
    assert not (folder / "run" / "cluster.json").exists()


def test_rebalance_without_a_cluster_says_what_to_start(serving: Serving, folder: Path, config: Path) -> None:
    if serving.process.poll() is None:
        serving.end()
    done = moetis(folder, "rebalance", "--config", str(config))
    assert done.returncode == 2
    assert "start `moetis serve`" in done.stderr


def test_ctrl_c_leaves_no_process_and_no_file_behind(tmp_path: Path) -> None:
    running = Serving(tmp_path, demo_like_config(tmp_path))
    try:
        family, ray_folder = running.family(), running.ray_folder()
        running.send({"id": "a", "prompt": PROMPTS[0], "max_new_tokens": 1500})
        assert running.end(signal.SIGINT) == 130
        assert still_alive(family) == []
        assert "Traceback" not in running.stderr()
        assert running.stderr().endswith("interrupted\n")
        assert not ray_folder.exists()
        assert not (tmp_path / "run" / "cluster.json").exists()
    finally:
        running.kill()


def test_a_signal_to_all_of_its_processes_ends_it_soon_and_leaves_nothing(tmp_path: Path) -> None:
    """As `timeout`, systemd and batch systems send it. Whoever asks Ray for anything then waits for a minute."""
    running = Serving(tmp_path, demo_like_config(tmp_path))
    try:
        family, ray_folder = running.family(), running.ray_folder()
        running.send({"id": "a", "prompt": PROMPTS[0], "max_new_tokens": 1500})
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        assert running.process.wait(timeout=40) == 130
        assert running.stderr().endswith("interrupted\n")
        assert still_alive(family) == []
        assert not ray_folder.exists()
    finally:
        running.kill()
