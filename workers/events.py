"""What a rank tells the outside about its requests: tokens as they come, and how each request ended."""

from __future__ import annotations

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
    """Takes the place of the manager's router: turns outputs into events and keeps them until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[str, int] = {}
        self._events: deque[TokenEvent] = deque()
        self._changed = threading.Condition()

    def open(self, request: str) -> None:
        """Expect outputs of a request; those of others are dropped."""
        with self._changed:
            self._sent[request] = 0

    def is_open(self, request: str) -> bool:
        with self._changed:
            return request in self._sent

    def close(self, request: str, end: str, error: str | None = None) -> None:
        """End a request from outside; whatever the engine still says of it is dropped."""
        with self._changed:
            if self._sent.pop(request, None) is not None:
                self._events.append(TokenEvent(request=request, tokens=(), end=end, error=error))
                self._changed.notify_all()

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        with self._changed:
            for output in outputs:
                sent = self._sent.get(output.request_id)
                if sent is None:
                    continue
                end = (FAILED if output.error else FINISHED) if output.is_finished() else None
                new = tuple(output.generated_tokens[sent:])
                self._events.append(TokenEvent(request=output.request_id, tokens=new, end=end, error=output.error))
                if end is None:
                    self._sent[output.request_id] = sent + len(new)
                else:
                    del self._sent[output.request_id]
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[TokenEvent]:
        """All events since the last call; waits up to timeout_s for the first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), timeout=timeout_s)
            taken = list(self._events)
            self._events.clear()
            return taken
