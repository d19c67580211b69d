"""A replica's share of the relay: asks go out, pieces come in and find their request."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from ray.exceptions import RayError

from cluster.gateway.errors import ApiError
from cluster.gateway.relay import BUSY, Ask, Piece, Refusal, Snapshot

POLL_S = 5.0
RETRY_S = 1.0
_T = TypeVar("_T")
LOST = "the serving process is gone; try again later"


class RelayPort(Protocol):
    """The relay's methods for replicas, over whatever lies between. Raise RayError where it can't be reached."""

    async def ask(self, client: str, ask: Ask) -> Refusal | None: ...

    async def withdraw(self, request: str) -> None: ...

    async def pieces(self, client: str, timeout_s: float) -> list[Piece]: ...

    async def snapshot(self) -> Snapshot: ...


class RelayActorPort:
    """The port to a relay that is a Ray actor."""

    def __init__(self, relay: Any) -> None:
        self._relay = relay

    async def ask(self, client: str, ask: Ask) -> Refusal | None:
        refusal: Refusal | None = await self._relay.ask.remote(client, ask)
        return refusal

    async def withdraw(self, request: str) -> None:
        await self._relay.withdraw.remote(request)

    async def pieces(self, client: str, timeout_s: float) -> list[Piece]:
        pieces: list[Piece] = await self._relay.pieces.remote(client, timeout_s)
        return pieces

    async def snapshot(self) -> Snapshot:
        snapshot: Snapshot = await self._relay.snapshot.remote()
        return snapshot


class Desk:
    """The requests of one replica. All in one event loop.

    When a client goes, Ray cancels what its request has called, wherever that runs. So nothing is asked of the relay in
    a request's name: a poll serves all requests, and a withdrawal is what is left of one.
    """

    def __init__(self, relay: RelayPort, client: str) -> None:
        self._relay = relay
        self._client = client
        self._waiting: dict[str, asyncio.Queue[Piece]] = {}
        self._poller: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def serve(self, ask: Ask) -> AsyncIterator[AsyncIterator[Piece]]:
        """The pieces of a request, the last one with an end. Leaving early withdraws it.

        Raises ApiError 429 where too much is under way, 503 where nothing serves.
        """
        name = ask.request.request
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._waiting[name] = pieces
        if self._poller is None or self._poller.done():
            self._poller = self._start(self._poll())
        asking = self._start(self._ask(ask))
        ended = False

        async def each() -> AsyncIterator[Piece]:
            nonlocal ended
            while not ended:
                piece = await pieces.get()
                ended = piece.end is not None
                yield piece

        try:
            await asyncio.shield(asking)
            yield each()
        finally:
            del self._waiting[name]
            if not ended:
                self._start(self._withdraw(name, asking))

    def _start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """A task that no request can cancel: in a context of its own, since by that Ray knows whose call it is."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def snapshot(self) -> Snapshot:
        """Raises ApiError 503 where the relay is gone."""
        try:
            return await self._relay.snapshot()
        except RayError as error:
            raise ApiError(503, LOST) from error

    async def _ask(self, ask: Ask) -> None:
        try:
            refusal = await self._relay.ask(self._client, ask)
        except RayError as error:
            raise ApiError(503, LOST) from error
        if refusal is not None:
            busy = refusal.kind == BUSY
            raise ApiError(429 if busy else 503, refusal.message, code="rate_limit_exceeded" if busy else None)

    async def _withdraw(self, name: str, asking: asyncio.Task[None]) -> None:
        """Once it was asked, or refused: the relay must not hear of the end before the beginning."""
        await asyncio.wait([asking])
        if asking.exception() is None:
            with contextlib.suppress(RayError):
                await self._relay.withdraw(name)

    async def _poll(self) -> None:
        while self._waiting:
            try:
                pieces = await self._relay.pieces(self._client, POLL_S)
            except RayError:
                pieces = [Piece(request=name, end="failed", error=LOST) for name in self._waiting]
                await asyncio.sleep(RETRY_S)
            for piece in pieces:
                queue = self._waiting.get(piece.request)
                if queue is not None:
                    queue.put_nowait(piece)
