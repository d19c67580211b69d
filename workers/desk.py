"""The desk of one founding: where a rank takes requests and hands out their events."""

from __future__ import annotations

from placement.errors import ExchangeError, RequestError
from workers.events import CANCELLED, FAILED, EventRouter, TokenEvent
from workers.lockstep import LockstepManager
from workers.requests import GenerationRequest, check_request


class Desk:
    """Before an engine is put behind it, and after it is left, it takes nothing; events can still be taken.

    max_tokens: of a request's prompt and answer together.
    """

    def __init__(self, *, rank: int, vocabulary: int, max_tokens: int, router: EventRouter) -> None:
        self.router = router
        self.engine: LockstepManager | None = None
        self._rank = rank
        self._vocabulary = vocabulary
        self._max_tokens = max_tokens

    def submit(self, request: GenerationRequest) -> None:
        """Take a request. Raises RequestError when it can't be served here; others are not affected. Raises
        ExchangeError where this rank has left its peers."""
        check_request(request, vocabulary=self._vocabulary, max_tokens=self._max_tokens)
        engine = self._running_engine()
        name = self.router.open(request.request)
        if name is None:
            raise RequestError(f"request '{request.request}': a request of this id is running")
        accepted = engine.add_request(
            list(request.prompt),
            request_id=name,
            max_new_tokens=request.max_new_tokens,
            streaming=request.stream,
            sampling=request.sampling,
        )
        if accepted is None:
            self.router.forget(request.request)
            raise ExchangeError(f"rank {self._rank} is stopping")

    def cancel(self, request: str) -> None:
        """Stop a request; its last event says 'cancelled'. A request that is not running is no error."""
        name = self.router.close(request, CANCELLED)
        if name is not None and self.engine is not None:
            self.engine.cancel_request(name)

    def fail(self, request: str, error: str) -> None:
        """End a request that can't be served on. One that has ended is no error."""
        name = self.router.close(request, FAILED, error)
        if name is not None and self.engine is not None:
            self.engine.cancel_request(name)

    def next_events(self, timeout_s: float) -> list[TokenEvent]:
        """The events since the last call; waits up to timeout_s for the first. Raises ExchangeError once all events
        are taken of a rank that has stopped serving."""
        events = self.router.take(timeout_s)
        if not events:
            self._running_engine()
        return events

    def _running_engine(self) -> LockstepManager:
        engine = self.engine
        if engine is None:
            raise ExchangeError(f"rank {self._rank} has left its peers")
        if not engine.is_running():
            raise ExchangeError(str(engine.background_thread_status.fatal_error))
        return engine
