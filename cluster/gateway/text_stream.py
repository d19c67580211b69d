"""From tokens to text, as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HALF_A_CHARACTER = "\ufffd"


class TextStream:
    """The text of one answer. Feed tokens in order; each call gives what may be shown since the last.

    Text that could be the beginning of a stop string is held back until it is clear. Once `stopped`, nothing more is
    fed. num_tokens counts what was fed, so up to the token that completed the stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        # Decoded before: tokens[_start:_read] is the context in which the next ones are decoded.
        self._start = 0
        self._read = 0
        self._held = ""
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def feed(self, token: int) -> str:
        """Text that can be shown now; may be empty."""
        assert not self.stopped, "a stopped answer gets no more tokens"
        self._tokens.append(token)
        return self._show(self._new_text(at_end=False))

    def finish(self) -> str:
        """The answer is at its end: what was held back."""
        shown = self._show(self._new_text(at_end=True))
        rest, self._held = self._held, ""
        return shown if self.stopped else shown + rest

    def _new_text(self, *, at_end: bool) -> str:
        before = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(before) or (text.endswith(_HALF_A_CHARACTER) and not at_end):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _show(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            self._held = ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many of text's last characters are the beginning of stop."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
