"""From tokens to text: whole characters, stop strings, and never a piece of one shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.text_stream import TextStream
from cluster.text import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "configs" / "models" / "demo")


def _stream(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(TOKENIZER, stop)
    shown = []
    for token in TOKENIZER(text)["input_ids"]:
        shown.append(stream.feed(token))
        if stream.stopped:
            return shown, stream
    return [*shown, stream.finish()], stream


@given(st.text(max_size=60))
def test_the_pieces_make_up_the_text(text: str) -> None:
    expected = TOKENIZER.decode(TOKENIZER(text)["input_ids"], skip_special_tokens=True)
    assert "".join(_stream(text)[0]) == expected


def test_half_a_character_is_not_shown() -> None:
    pieces, _ = _stream("日本語 öäü 🙂🙂")
    assert "".join(pieces) == "日本語 öäü 🙂🙂"
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, stream = _stream(text, tuple(stop))
    places = [text.index(one) for one in stop if one in text]
    shown = "".join(pieces)
    assert stream.stopped == bool(places)
    assert text.startswith(shown)
    assert not any(one in shown for one in stop)
    if not places:
        assert shown == text


def test_what_could_become_a_stop_string_is_held_back_and_then_shown() -> None:
    stream = TextStream(TOKENIZER, ("###",))
    shown = [stream.feed(token) for token in TOKENIZER("a ## b")["input_ids"]]
    assert "".join(shown) + stream.finish() == "a ## b"


def test_tokens_after_the_stop_string_are_a_bug() -> None:
    stream = TextStream(TOKENIZER, ("a",))
    stream.feed(TOKENIZER("a")["input_ids"][0])
    with pytest.raises(AssertionError, match="no more tokens"):
        stream.feed(5)
