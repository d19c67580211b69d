"""The gateway as clients use it: the official `openai` package, raw HTTP for what it can't say, one real cluster."""

from __future__ import annotations

import http.client
import ipaddress
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.gateway.prompts import plain_chat
from cluster.gateway.protocol import Message
from cluster.verify import plain_texts
from tests.e2e.running import DEMO_OPTIONS, Serving, demo_like_config, moetis, still_alive

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KEY = "a-key-for-tests-0123456789"
MOST_REQUESTS = 8
PROMPTS = [
    "def read(path):\n    with open(path) as",
    "package main\n\nfunc main() {\n",
    "Um ein neues Dokument zu öffnen, wählen Sie",
    "Para abrir un archivo, seleccione",
]
CHAT: Any = [{"role": "system", "content": "Answer in code."}, {"role": "user", "content": "import numpy as"}]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    gateway = {"model_name": "demo", "api_keys_env": "TEST_KEYS", "max_requests": MOST_REQUESTS, "max_body_kb": 256}
    return demo_like_config(folder, topology="2x1", slots_per_rank=20, gateway=gateway)


@pytest.fixture(scope="module")
def serving(folder: Path, config: Path, port: int) -> Iterator[Serving]:
    running = Serving(
        folder,
        config,
        "--http",
        f"127.0.0.1:{port}",
        ready="/v1",
        environment={"TEST_KEYS": f"other-key-0123456789,{KEY}"},
        within_s=300,
    )
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(serving: Serving, port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    """What the plain model writes, greedily, to each prompt."""
    prompts = [*PROMPTS, plain_chat([Message(**message) for message in CHAT])]
    return dict(zip(prompts, plain_texts(DEMO_OPTIONS, [(prompt, NEW) for prompt in prompts]), strict=True))


def _write(client: openai.OpenAI, prompt: str, **more: Any) -> str:
    how = {"max_tokens": NEW, "temperature": 0} | more
    return client.completions.create(model="demo", prompt=prompt, **how).choices[0].text


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def _running(port: int) -> int:
    line = next(
        line for line in _get(port, "/metrics")[1].splitlines() if line.startswith("moetis_gateway_running_req")
    )
    return int(line.split()[-1])


def _soon(true: Callable[[], bool], within_s: float = 60) -> bool:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_the_model_is_listed_and_another_is_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "moetis"
    with pytest.raises(openai.NotFoundError, match="this cluster serves 'demo'"):
        client.models.retrieve("gpt-9")


def test_texts_at_temperature_0_are_those_of_the_plain_model(client: openai.OpenAI, plain: dict[str, str]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: _write(client, prompt), PROMPTS)) == [plain[prompt] for prompt in PROMPTS]


def test_usage_counts_prompt_and_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=[5, 6, 7], max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_is_the_plain_models_text_whole_and_streamed(client: openai.OpenAI, plain: dict[str, str]) -> None:
    expected = plain[plain_chat([Message(**message) for message in CHAT])]
    whole = client.chat.completions.create(model="demo", messages=CHAT, max_completion_tokens=NEW, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=CHAT,
            max_tokens=NEW,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert whole.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert len(chunks) > NEW / 2
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NEW
    assert chunks[-2].choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, plain: dict[str, str]) -> None:
    whole = plain[PROMPTS[0]]
    stop = whole[8:11]
    answer = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=NEW, temperature=0, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < NEW


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(client: openai.OpenAI) -> None:
    def write(seed: int) -> str:
        return _write(client, PROMPTS[0], temperature=1.2, top_p=0.95, seed=seed)

    alone = write(1)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(write, [1, 2, 1, 3, 4, 1]))
    assert [together[0], together[2], together[5]] == [alone] * 3
    assert len({alone, *together}) == 4


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{nonsense", 400, "not JSON"),
        (b'{"model": "demo", "prompt": "\xff\xfe"}', 400, "not JSON"),
        (b"[]", 400, "object"),
        (b'{"model": "demo"}', 400, "'prompt' is required"),
        (b'{"model": "gpt-9", "prompt": "a"}', 404, "does not exist"),
        (b'{"model": "demo", "prompt": ""}', 400, "prompt is empty"),
        (b'{"model": "demo", "prompt": [99999999]}', 400, "not in the vocabulary"),
        (b'{"model": "demo", "prompt": ["a", "b"]}', 400, "one prompt a request"),
        (b'{"model": "demo", "prompt": "a", "max_tokens": -1}', 400, "'max_tokens'"),
        (b'{"model": "demo", "prompt": "a", "max_tokens": 1000000000000}', 400, "context is 4096 tokens"),
        (b'{"model": "demo", "prompt": "' + 20_000 * b"a b " + b'"}', 400, "context is 4096 tokens"),
        (b'{"model": "demo", "prompt": "' + 300_000 * b"a" + b'"}', 413, "larger than 262144 bytes"),
        (b'{"model": "demo", "prompt": "a", "temperature": 3}', 400, "'temperature'"),
        (b'{"model": "demo", "prompt": "a", "temperature": NaN}', 400, ""),
        (b'{"model": "demo", "prompt": "a", "top_p": 0}', 400, "'top_p'"),
        (b'{"model": "demo", "prompt": "a", "n": 2}', 400, "'n'"),
        (b'{"model": "demo", "prompt": "a", "stop": ["a", "b", "c", "d", "e"]}', 400, "at most 4"),
        (b'{"model": "demo", "prompt": "a", "logit_bias": {"5": 1}}', 400, "'logit_bias'"),
        (b'{"model": "demo", "prompt": "\\ud800"}', 400, "not JSON"),
        (b'{"model": "demo", "prompt": ' + 20_000 * b"[", 400, "not JSON"),
        (b'{"model": "demo", "prompt": [true]}', 400, "'prompt"),
        (b'{"model": "demo", "prompt": [-1]}', 400, "not in the vocabulary"),
        (b'{"model": "demo", "prompt": "a", "surprise": 1}', 400, "unrecognized request argument: surprise"),
    ],
)
def test_bad_input_is_told_in_openais_form(serving: Serving, port: int, body: bytes, status: int, said: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    assert (answer.status, set(error)) == (status, {"message", "type", "param", "code"})
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]


def test_a_body_that_does_not_say_its_length_is_counted(serving: Serving, port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", "/v1/completions", iter(8 * [65_536 * b"a"]), {"Authorization": f"Bearer {KEY}"}, encode_chunked=True
    )
    answer = connection.getresponse()
    assert answer.status == 413
    assert "larger than 262144 bytes" in json.loads(answer.read())["error"]["message"]


def test_a_route_that_is_not_there_is_told_in_openais_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Not Found: POST /v1/embeddings"):
        client.embeddings.create(model="demo", input="a")


@pytest.mark.parametrize("key", ["wrong", "", KEY + "x", KEY[:-1]])
def test_without_a_key_nothing_is_served(serving: Serving, port: int, key: str) -> None:
    stranger = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key or "none", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_operators_see_health_readiness_and_figures(client: openai.OpenAI, port: int) -> None:
    assert _get(port, "/health")[0] == 200
    assert _soon(lambda: json.loads(_get(port, "/ready")[1]).get("ranks") == 2)
    assert "moetis_gateway_finished_total" in _get(port, "/metrics")[1]


def test_a_client_that_goes_away_stops_its_request(client: openai.OpenAI, port: int) -> None:
    stream = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=3000, temperature=0, stream=True)
    next(iter(stream))
    assert _running(port) == 1
    stream.close()
    assert _soon(lambda: _running(port) == 0)
    impatient = client.with_options(timeout=2)
    with pytest.raises(openai.APITimeoutError):
        _write(impatient, PROMPTS[0], max_tokens=3000)
    assert _soon(lambda: _running(port) == 0)


def test_a_client_that_goes_away_takes_no_other_along(client: openai.OpenAI, port: int) -> None:
    how: Any = {"model": "demo", "prompt": PROMPTS[0], "temperature": 0, "stream": True}
    # The first one starts what brings the pieces of all.
    leaving = client.completions.create(max_tokens=2000, **how)
    next(iter(leaving))
    staying = iter(client.completions.create(max_tokens=NEW, **how))
    pieces = [next(staying)]
    leaving.close()
    pieces += list(staying)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert _soon(lambda: _running(port) == 0)


def test_beyond_the_limit_clients_are_told_to_come_back(client: openai.OpenAI, port: int) -> None:
    how: Any = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 2000, "temperature": 0, "stream": True}
    streams = [client.completions.create(**how) for _ in range(MOST_REQUESTS)]
    with pytest.raises(openai.RateLimitError, match="8 requests are under way") as refused:
        client.completions.create(**how)
    assert refused.value.response.headers["retry-after"] == "1"
    for stream in streams:
        stream.close()
    assert _soon(lambda: _running(port) == 0)


@pytest.mark.slow
def test_experts_move_while_clients_stream(
    client: openai.OpenAI, plain: dict[str, str], folder: Path, config: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(moetis, folder, "rebalance", "--config", str(config), "--json", timeout_s=300)
        texts = []
        while not moving.done():
            texts.append(_write(client, PROMPTS[0]))
    assert moving.result().returncode == 0, moving.result().stderr
    assert set(texts) == {plain[PROMPTS[0]]}


def test_nothing_listens_beyond_loopback(serving: Serving) -> None:
    open_to_all = {
        (process.name(), connection.laddr.ip)
        for process in serving.family()
        for connection in process.net_connections(kind="inet")
        if connection.status == "LISTEN"
        and not ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:")).is_loopback
    }
    assert open_to_all == set()


def test_no_key_is_written_anywhere(serving: Serving, folder: Path) -> None:
    files = [*serving.ray_folder().rglob("*"), *(folder / "run").rglob("*"), folder / "stderr"]
    found = [path for path in files if path.is_file() and not path.is_symlink() and KEY.encode() in path.read_bytes()]
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("who", ["ray::ServeReplica", "ray::Relay", "ray::ProxyActor"])
def test_a_killed_part_of_the_gateway_comes_back(client: openai.OpenAI, serving: Serving, who: str) -> None:
    victim = next(process for process in serving.family() if " ".join(process.cmdline()).startswith(who))
    victim.send_signal(signal.SIGKILL)

    def answers() -> bool:
        try:
            return _write(client.with_options(timeout=10), PROMPTS[0], max_tokens=4) != ""
        except openai.APIError:
            return False

    victim.wait(20)
    assert _soon(answers)


@pytest.mark.slow
def test_a_second_cluster_on_the_same_address_is_one_clear_sentence(
    serving: Serving, tmp_path: Path, port: int
) -> None:
    done = moetis(tmp_path, "serve", "--config", str(demo_like_config(tmp_path)), "--http", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert done.stderr.strip() == f"moetis: --http '127.0.0.1:{port}': cannot listen there: Address already in use"


def test_a_cluster_whose_serving_process_is_killed_leaves_nothing(serving: Serving) -> None:
    family, ray_folder = serving.family(), serving.ray_folder()
    serving.kill()
    assert still_alive(family) == []
    assert _soon(lambda: not ray_folder.exists(), within_s=20)
