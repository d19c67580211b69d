"""Fixtures for tests of two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.ranks import meet_in_threads
from workers import peers


@pytest.fixture
def groups() -> Iterator[list[peers.Peers]]:
    """The process groups of two ranks, real gloo, in two threads."""
    found = meet_in_threads(2, epoch=7)
    yield found
    for group in found:
        group.leave()
