"""Addresses, keys, homes and prompts of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config import GatewayConfig
from cluster.gateway.deploy import Address, check_address, parse_address
from cluster.gateway.errors import ApiError
from cluster.gateway.homes import MOST_SESSIONS, SESSION_SLACK, Homes
from cluster.gateway.keys import key_is_known, read_key_hashes
from cluster.gateway.prompts import chat_prompt
from cluster.gateway.protocol import Message
from cluster.text import load_tokenizer
from placement.errors import ConfigError
from placement.routing import TokenTable
from placement.topology import load_topology

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", Address(host="127.0.0.1", port=8000)),
        ("8000", Address(host="127.0.0.1", port=8000)),
        ("[::1]:80", Address(host="::1", port=80)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:99999", "a:b", ":-1"])
def test_what_is_no_address_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        parse_address(text)


def test_an_address_that_others_reach_needs_keys() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        check_address(Address(host="0.0.0.0", port=8000), with_keys=False)


def test_keys_come_from_a_file_without_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  first-key-0123456789  \nsecond-key-0123456789\n")
    hashes = read_key_hashes(GatewayConfig(api_keys_file=path))
    assert len(hashes) == 2
    assert key_is_known("Bearer first-key-0123456789", hashes)
    assert key_is_known("bearer second-key-0123456789", hashes)
    for wrong in (None, "", "first-key-0123456789", "Basic first-key-0123456789", "Bearer ", "Bearer # ours"):
        assert not key_is_known(wrong, hashes)


def test_keys_come_from_a_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEYS", "first-key-0123456789, second-key-0123456789")
    assert key_is_known("Bearer second-key-0123456789", read_key_hashes(GatewayConfig(api_keys_env="OUR_KEYS")))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"api_keys_env": "NO_SUCH_VARIABLE"}, "holds no key"),
        ({"api_keys_file": Path("/no/such")}, "No such file"),
        ({"api_keys_file": Path("/dev/null")}, "holds no key"),
        ({"api_keys_file": Path("a"), "api_keys_env": "B"}, "both given"),
    ],
)
def test_keys_that_are_not_there_are_an_error_not_an_open_door(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_key_hashes(GatewayConfig(**how))


def test_a_short_key_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEYS", "hunter2")
    with pytest.raises(ConfigError, match="fewer than 16") as refused:
        read_key_hashes(GatewayConfig(api_keys_env="OUR_KEYS"))
    assert "hunter2" not in str(refused.value)


def test_homes_spread_and_sessions_stay() -> None:
    homes = Homes(load_topology("2x2"))
    assert sorted(homes.choose((1,), None) for _ in range(4)) == [0, 1, 2, 3]
    first = homes.choose((1,), "ada")
    assert [homes.choose((1,), "ada") for _ in range(3)] == [first] * 3
    for _ in range(4):
        homes.finish(first)
    assert sum(homes.running) == 4


def test_a_session_does_not_make_a_hot_spot() -> None:
    homes = Homes(load_topology("2x2"))
    ranks = [homes.choose((1,), "busy") for _ in range(100)]
    assert max(homes.running) <= 100 / 4 + SESSION_SLACK + 2
    assert len(set(ranks)) == 4


def test_a_prompt_goes_to_the_node_that_its_tokens_save_most_on() -> None:
    homes = Homes(load_topology("2x2"))
    homes.learn(TokenTable(value=np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)))
    assert homes.choose((1, 1), None) in (2, 3)
    assert homes.choose((0, 0), None) in (0, 1)


def test_a_table_for_fewer_nodes_says_nothing() -> None:
    homes = Homes(load_topology("2x2"))
    homes.learn(TokenTable(value=np.ones((2, 1), np.float32)))
    assert sorted(homes.choose((1,), None) for _ in range(4)) == [0, 1, 2, 3]


def test_sessions_are_forgotten_in_the_end() -> None:
    homes = Homes(load_topology("1x2"))
    for number in range(MOST_SESSIONS + 5):
        homes.finish(homes.choose((), str(number)))
    assert len(homes._routing.sessions) <= MOST_SESSIONS


def test_a_chat_is_written_in_the_models_template_and_a_refusal_is_the_clients_error() -> None:
    tokenizer = load_tokenizer(MODEL)
    message = Message(role="user", content=[{"type": "text", "text": "hello"}])
    assert tokenizer.decode(chat_prompt(tokenizer, [message])) == "user: hello\nassistant:"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert tokenizer.decode(chat_prompt(tokenizer, [message])) == "<user>hello"
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ApiError, match="roles must alternate"):
        chat_prompt(tokenizer, [message])
