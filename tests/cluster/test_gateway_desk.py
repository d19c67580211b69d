"""A replica's desk with a real relay: what a client that goes may take along, and what it must not."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar

from cluster.gateway.desk import Desk
from cluster.gateway.relay import Ask, FleetState, Piece, Refusal, Relay, Snapshot
from workers.requests import GenerationRequest

# By such a variable Ray knows whose call a call is, and what to cancel with it.
WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


class Road:
    """The relay as a replica reaches it; asking takes a moment. calls: what was asked, in whose name."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.calls: list[tuple[str, str]] = []

    async def ask(self, client: str, ask: Ask) -> Refusal | None:
        await asyncio.sleep(0.05)
        self.calls.append(("ask", WHOSE.get()))
        return await self._relay.ask(client, ask)

    async def withdraw(self, request: str) -> None:
        self.calls.append(("withdraw", WHOSE.get()))
        await self._relay.withdraw(request)

    async def pieces(self, client: str, timeout_s: float) -> list[Piece]:
        self.calls.append(("pieces", WHOSE.get()))
        return await self._relay.pieces(client, timeout_s)

    async def snapshot(self) -> Snapshot:
        return await self._relay.snapshot()


def _ask(name: str) -> Ask:
    return Ask(request=GenerationRequest(request=name, prompt=(1, 2), max_new_tokens=4))


async def _request(desk: Desk, name: str) -> list[Piece]:
    WHOSE.set(name)
    async with desk.serve(_ask(name)) as pieces:
        return [piece async for piece in pieces]


async def _ready_relay() -> Relay:
    relay = Relay(max_requests=4, max_tokens=1000)
    await relay.take(0.0)
    await relay.set_state(FleetState(ready=True, reason=""))
    return relay


def test_nothing_is_asked_in_the_name_of_a_request_and_one_that_goes_leaves_the_others() -> None:
    async def scene() -> tuple[list[Piece], list[tuple[str, str]], Snapshot]:
        relay = await _ready_relay()
        road = Road(relay)
        desk = Desk(road, "replica")
        leaving, staying = (asyncio.create_task(_request(desk, name)) for name in ("leaving", "staying"))
        await asyncio.sleep(0.2)
        leaving.cancel()
        await asyncio.sleep(0.2)
        await relay.deliver([Piece(request="staying", tokens=(7,), end="finished")])
        return await staying, road.calls, await relay.snapshot()

    pieces, calls, snapshot = asyncio.run(scene())
    assert [piece.end for piece in pieces] == ["finished"]
    assert {whose for _, whose in calls} == {"nobody's"}
    assert [what for what, _ in calls].count("withdraw") == 1
    assert snapshot.running == 0


def test_a_client_that_goes_while_it_is_asked_for_is_withdrawn_afterwards() -> None:
    async def scene() -> tuple[list[str], Snapshot]:
        relay = await _ready_relay()
        road = Road(relay)
        request = asyncio.create_task(_request(Desk(road, "replica"), "hasty"))
        await asyncio.sleep(0.01)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        await asyncio.sleep(0.2)
        return [what for what, _ in road.calls if what != "pieces"], await relay.snapshot()

    calls, snapshot = asyncio.run(scene())
    assert calls == ["ask", "withdraw"]
    assert snapshot.running == 0
