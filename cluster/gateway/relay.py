"""The relay: one small actor between the gateway's replicas and the process that holds the fleet.

Glossary. An ask is a request that a replica wants served; a piece is what became of it since the last one; a client is
one replica. Replicas ask, withdraw and poll for pieces; the fleet's side takes asks and withdrawals, and delivers
pieces. The relay counts what is under way, so that its limits hold over all replicas; it keeps nothing else, and no
prompt longer than it takes to hand it on. A plain class of one event loop: `deploy.py` makes it an actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from workers.requests import GenerationRequest

CLIENT_LOST_S = 60.0
HOLDER_LOST_S = 30.0
BUSY, UNAVAILABLE = "busy", "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to serve. session: requests of one session go to one home."""

    request: GenerationRequest
    session: str | None = None

    @property
    def num_tokens(self) -> int:
        """What it may come to hold in the cache."""
        return len(self.request.prompt) + self.request.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New tokens of a request. end: None while it runs, then 'finished', 'cancelled' or 'failed' (with error)."""

    request: str
    tokens: tuple[int, ...] = ()
    end: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why an ask was not taken. kind: 'busy' (try again later) or 'unavailable' (nothing serves)."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """What the fleet's side last said of itself. ready: requests can be served."""

    ready: bool = False
    reason: str = "the workers are starting"
    epoch: int = -1
    ranks: int = 0
    ranks_alive: int = 0
    steps: int = 0


@dataclass(slots=True, kw_only=True)
class Figures:
    """Counters since the relay started. first_token_s: the sum of the waits of first_tokens requests.

    withdrawn: the client went away, or had all that it wanted (a stop string).
    """

    asked: int = 0
    refused: int = 0
    finished: int = 0
    withdrawn: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole of what /ready and /metrics show."""

    state: FleetState
    figures: Figures
    running: int
    running_tokens: int


@dataclass(slots=True)
class _Open:
    """A request under way."""

    client: str
    num_tokens: int
    asked_at: float
    started: bool = False


@dataclass(slots=True)
class _Client:
    """A replica: its pieces that wait to be taken, and when it last came for some."""

    seen_at: float
    pieces: list[Piece] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """See the module. max_requests, max_tokens: what may be under way at once, over all replicas."""

    def __init__(self, *, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._running_tokens = 0
        self._clients: dict[str, _Client] = {}
        self._waiting: list[Ask | str] = []
        self._work = asyncio.Event()
        self._state = FleetState()
        self._figures = Figures()
        self._holder_seen_at = clock()

    # ------------------------------------------------------------------------------------------- the replicas' side

    async def ask(self, client: str, ask: Ask) -> Refusal | None:
        """Take a request on, or say why not."""
        self._figures.asked += 1
        refusal = self._refusal(ask)
        if refusal is not None:
            self._figures.refused += 1
            return refusal
        self._client(client)
        self._open[ask.request.request] = _Open(client, ask.num_tokens, self._clock())
        self._running_tokens += ask.num_tokens
        self._figures.prompt_tokens += len(ask.request.prompt)
        self._pass_on(ask)
        return None

    def _refusal(self, ask: Ask) -> Refusal | None:
        state = self._current_state()
        if not state.ready:
            return Refusal(kind=UNAVAILABLE, message=f"the cluster is not ready: {state.reason}")
        if len(self._open) >= self._max_requests:
            return Refusal(kind=BUSY, message=f"{self._max_requests} requests are under way; try again later")
        if self._running_tokens + ask.num_tokens > self._max_tokens and self._open:
            return Refusal(
                kind=BUSY,
                message=f"the requests under way hold {self._running_tokens} of {self._max_tokens} tokens; this one "
                f"needs {ask.num_tokens}; try again later",
            )
        return None

    async def withdraw(self, request: str) -> None:
        """A client has gone or has all that it wanted: stop the request and say nothing more of it."""
        if request in self._open:
            self._close(request)
            self._figures.withdrawn += 1
            self._pass_on(request)

    async def pieces(self, client: str, timeout_s: float) -> list[Piece]:
        """The pieces of this client's requests since the last call; waits up to timeout_s for the first."""
        known = self._client(client)
        if not known.pieces:
            await _wait(known.news, timeout_s)
        known.news.clear()
        known.seen_at = self._clock()
        taken, known.pieces = known.pieces, []
        return taken

    async def snapshot(self) -> Snapshot:
        return Snapshot(
            state=self._current_state(),
            figures=self._figures,
            running=len(self._open),
            running_tokens=self._running_tokens,
        )

    # --------------------------------------------------------------------------------------------- the fleet's side

    async def take(self, timeout_s: float) -> list[Ask | str]:
        """Asks, and the names of requests withdrawn, in order; waits up to timeout_s for the first."""
        self._holder_seen_at = self._clock()
        self._forget_lost_clients()
        if not self._waiting:
            await _wait(self._work, timeout_s)
        self._work.clear()
        self._holder_seen_at = self._clock()
        taken, self._waiting = self._waiting, []
        return taken

    async def deliver(self, pieces: Iterable[Piece]) -> None:
        """What became of requests. Pieces of one that was withdrawn are dropped."""
        for piece in pieces:
            mine = self._open.get(piece.request)
            if mine is None:
                continue
            self._count(mine, piece)
            if piece.end is not None:
                self._close(piece.request)
            client = self._clients.get(mine.client)
            if client is not None:
                client.pieces.append(piece)
                client.news.set()

    async def set_state(self, state: FleetState) -> None:
        self._state = state

    # ---------------------------------------------------------------------------------------------------- book-keeping

    def _current_state(self) -> FleetState:
        if self._state.ready and self._clock() - self._holder_seen_at > HOLDER_LOST_S:
            return replace(self._state, ready=False, reason="the serving process does not answer")
        return self._state

    def _client(self, client: str) -> _Client:
        return self._clients.setdefault(client, _Client(self._clock()))

    def _pass_on(self, item: Ask | str) -> None:
        self._waiting.append(item)
        self._work.set()

    def _close(self, request: str) -> None:
        self._running_tokens -= self._open.pop(request).num_tokens

    def _count(self, mine: _Open, piece: Piece) -> None:
        figures = self._figures
        figures.new_tokens += len(piece.tokens)
        if piece.tokens and not mine.started:
            mine.started = True
            figures.first_tokens += 1
            figures.first_token_s += self._clock() - mine.asked_at
        if piece.end is not None:
            setattr(figures, piece.end, getattr(figures, piece.end) + 1)

    def _forget_lost_clients(self) -> None:
        """A replica that was killed never withdraws: what it asked for must not run on for nobody."""
        now = self._clock()
        for name in [name for name, client in self._clients.items() if now - client.seen_at > CLIENT_LOST_S]:
            del self._clients[name]
            for request in [request for request, mine in self._open.items() if mine.client == name]:
                self._close(request)
                self._figures.withdrawn += 1
                self._pass_on(request)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
