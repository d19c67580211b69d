"""The ledger: every request that runs, the tokens it has so far, and which founding of the ranks works on it.

When ranks are lost, what a request has so far becomes part of its prompt, and it goes on elsewhere; greedy text, and
text drawn by a seed, is then what it would have been. Each token is handed on once: events of an earlier founding count
for nothing after the request has gone on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from placement.errors import MoetisError
from workers.events import FAILED, FINISHED, TokenEvent
from workers.requests import GenerationRequest

# A request that comes no token further in so many foundings may be what breaks them.
MOST_FRUITLESS = 5


@dataclass(frozen=True, slots=True)
class Generation:
    """A request under way: its events as they come, or all of its tokens at the end. home: the seat it began on."""

    request: str
    home: int
    _events: queue.SimpleQueue[TokenEvent]

    def events(self) -> Iterator[TokenEvent]:
        """Each event, the last one being that with an end."""
        while True:
            event = self._events.get()
            yield event
            if event.end is not None:
                return

    def tokens(self) -> tuple[int, ...]:
        """Wait for the end; the tokens. Raises MoetisError where the request failed or was cancelled."""
        tokens: list[int] = []
        for event in self.events():
            tokens.extend(event.tokens)
            if event.end not in (None, "finished"):
                raise MoetisError(f"request '{self.request}' {event.end}: {event.error or 'on request'}")
        return tuple(tokens)


@dataclass(slots=True)
class _Entry:
    generation: Generation
    request: GenerationRequest
    seat: int
    founding: int | None = None
    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    began_with: int = 0
    fruitless: int = 0


class Ledger:
    """Safe to use from threads."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._closed: str | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def add(self, request: GenerationRequest, seat: int, events: queue.SimpleQueue[Any]) -> Generation:
        """A new request; it waits until it is taken by a founding. One of an id that runs fails, the other goes on."""
        generation = Generation(request.request, seat, events)
        with self._lock:
            problem = self._closed
            if request.request in self._entries:
                problem = f"request '{request.request}': a request of this id is running"
            if problem is not None:
                events.put(TokenEvent(request=request.request, tokens=(), end=FAILED, error=problem))
            else:
                self._entries[request.request] = _Entry(generation, request, seat)
        return generation

    def take(self, founding: int, names: Sequence[str] | None = None) -> list[tuple[int, GenerationRequest]]:
        """What waits (of these names), with its seat, as it is to go on: now this founding works on it."""
        taken: list[tuple[int, GenerationRequest]] = []
        with self._lock:
            for name in list(self._entries) if names is None else names:
                entry = self._entries.get(name)
                if entry is None or entry.founding is not None:
                    continue
                left = entry.request.max_new_tokens - len(entry.tokens)
                if left <= 0:
                    self._end(entry, FINISHED)
                    continue
                entry.founding, entry.began_with = founding, len(entry.tokens)
                prompt = entry.request.prompt + tuple(entry.tokens)
                taken.append((entry.seat, replace(entry.request, prompt=prompt, max_new_tokens=left)))
        return taken

    def move(self, name: str, seat: int) -> None:
        """A request has another home from now on."""
        with self._lock:
            if name in self._entries:
                self._entries[name].seat = seat

    def seat_of(self, name: str) -> int | None:
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None else entry.seat

    def interrupt(self) -> None:
        """The ranks have parted: everything waits again. What has come no further too often fails."""
        with self._lock:
            for entry in list(self._entries.values()):
                if entry.founding is None:
                    continue
                entry.founding = None
                entry.fruitless = 0 if len(entry.tokens) > entry.began_with else entry.fruitless + 1
                if entry.fruitless >= MOST_FRUITLESS:
                    self._end(entry, FAILED, f"the ranks were lost {MOST_FRUITLESS} times before it came any further")

    def deliver(self, event: TokenEvent, founding: int | None) -> None:
        """Hand on what a founding has written. Streams get it at once, others when all is there."""
        with self._lock:
            entry = self._entries.get(event.request)
            if entry is None or entry.founding != founding:
                return
            entry.tokens.extend(event.tokens)
            if event.end is not None:
                self._end(entry, event.end, event.error)
            elif entry.request.stream and event.tokens:
                entry.shown = len(entry.tokens)
                entry.generation._events.put(event)

    def refuse(self, name: str, founding: int, reason: str) -> None:
        """A founding does not take a request."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.founding == founding:
                self._end(entry, FAILED, reason)

    def end(self, name: str, end: str, error: str | None = None) -> None:
        """End a request from here; what is still written of it is dropped."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._end(entry, end, error)

    def close(self, reason: str) -> None:
        """Nobody will serve any more: everything fails, and so does what still comes."""
        with self._lock:
            self._closed = reason
            for entry in list(self._entries.values()):
                self._end(entry, FAILED, reason)

    def _end(self, entry: _Entry, end: str, error: str | None = None) -> None:
        del self._entries[entry.request.request]
        rest = tuple(entry.tokens[entry.shown :])
        entry.generation._events.put(TokenEvent(request=entry.request.request, tokens=rest, end=end, error=error))
