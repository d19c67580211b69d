"""What a rank tells the outside about its requests: tokens as they come, and how each request ended."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens of one request. end is None while it runs, then 'finished', 'cancelled' or 'failed' (with error)."""

    request: str
    tokens: tuple[int, ...]
    end: str | None = None
    error: str | None = None


class EventRouter(OutputRouter):
    """Takes the place of the manager's router: turns outputs into events and keeps them until they are taken.

    The engine knows a request by a name of its own, `serial:request`, so that one that was cancelled and one that was
    then submitted under the same id are not taken for each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._serial = itertools.count()
        self._engine_names: dict[str, str] = {}
        self._sent: dict[str, int] = {}
        self._events: deque[TokenEvent] = deque()
        self._interrupted = False
        self._changed = threading.Condition()

    def open(self, request: str) -> str | None:
        """Expect outputs of a request. Returns its name in the engine, or None where it is running already."""
        with self._changed:
            if request in self._engine_names:
                return None
            name = f"{next(self._serial)}:{request}"
            self._engine_names[request] = name
            self._sent[name] = 0
            return name

    def close(self, request: str, end: str, error: str | None = None) -> str | None:
        """End a request from outside; what the engine still says of it is dropped. Returns its name in the engine."""
        with self._changed:
            name = self._engine_names.pop(request, None)
            if name is not None:
                del self._sent[name]
                self._events.append(TokenEvent(request=request, tokens=(), end=end, error=error))
                self._changed.notify_all()
            return name

    def forget(self, request: str) -> None:
        """The engine did not take a request: nothing is said of it."""
        with self._changed:
            name = self._engine_names.pop(request, None)
            if name is not None:
                del self._sent[name]

    def interrupt(self) -> None:
        """The engine breaks off: from now on a request that fails has only come to a halt, and its event has no end."""
        with self._changed:
            self._interrupted = True

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        with self._changed:
            for output in outputs:
                if output.request_id in self._sent:
                    event = self._event_of(output)
                    if event.tokens or event.end is not None:
                        self._events.append(event)
            self._changed.notify_all()

    def _event_of(self, output: GenerationOutput) -> TokenEvent:
        name, request = output.request_id, request_of(output.request_id)
        new = tuple(output.generated_tokens[self._sent[name] :])
        if not output.is_finished() or (output.error and self._interrupted):
            self._sent[name] += len(new)
            return TokenEvent(request=request, tokens=new)
        del self._sent[name], self._engine_names[request]
        return TokenEvent(request=request, tokens=new, end=FAILED if output.error else FINISHED, error=output.error)

    def take(self, timeout_s: float) -> list[TokenEvent]:
        """All events since the last call; waits up to timeout_s for the first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), timeout=timeout_s)
            taken = list(self._events)
            self._events.clear()
            return taken


def request_of(engine_name: str) -> str:
    """The request that the engine knows by this name."""
    return engine_name.split(":", 1)[1]
