"""One cluster a file of tests, served over stdin, unless the file brings a fixture of the same name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running import Serving, demo_like_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return demo_like_config(folder)


@pytest.fixture(scope="module")
def port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture(scope="module")
def serving(folder: Path, config: Path) -> Iterator[Serving]:
    running = Serving(folder, config)
    yield running
    running.kill()
