"""The relay: limits over all replicas, withdrawals, and clients and holders that are lost."""

from __future__ import annotations

import asyncio

from cluster.gateway.relay import BUSY, CLIENT_LOST_S, HOLDER_LOST_S, UNAVAILABLE, Ask, FleetState, Piece, Relay
from workers.requests import GenerationRequest


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _ask(name: str, new: int = 10) -> Ask:
    return Ask(request=GenerationRequest(request=name, prompt=(1, 2), max_new_tokens=new))


async def _ready(clock: _Clock, *, max_requests: int = 2, max_tokens: int = 100) -> Relay:
    relay = Relay(max_requests=max_requests, max_tokens=max_tokens, clock=clock)
    await relay.set_state(FleetState(ready=True, reason="", ranks=2))
    return relay


def test_a_piece_finds_the_client_that_asked() -> None:
    async def life() -> None:
        relay = await _ready(_Clock())
        assert await relay.ask("one", _ask("a")) is None
        assert await relay.ask("two", _ask("b")) is None
        assert [ask.request.request for ask in await relay.take(0.1) if isinstance(ask, Ask)] == ["a", "b"]
        await relay.deliver([Piece(request="b", tokens=(7,), end="finished")])
        assert await relay.pieces("one", 0.01) == []
        assert await relay.pieces("two", 0.01) == [Piece(request="b", tokens=(7,), end="finished")]
        snapshot = await relay.snapshot()
        assert (snapshot.running, snapshot.running_tokens, snapshot.figures.finished) == (1, 12, 1)

    asyncio.run(life())


def test_a_poll_that_waits_is_woken_by_a_piece() -> None:
    async def life() -> None:
        relay = await _ready(_Clock())
        await relay.ask("one", _ask("a"))
        waiting = asyncio.create_task(relay.pieces("one", 10))
        await asyncio.sleep(0.01)
        await relay.deliver([Piece(request="a", tokens=(1,))])
        assert len(await asyncio.wait_for(waiting, 1)) == 1

    asyncio.run(life())


def test_limits_hold_over_all_clients() -> None:
    async def life() -> None:
        relay = await _ready(_Clock(), max_tokens=30)
        assert await relay.ask("one", _ask("a")) is None
        refusal = await relay.ask("two", _ask("b", new=20))
        assert refusal is not None
        assert refusal.kind == BUSY
        assert "12 of 30 tokens" in refusal.message
        assert await relay.ask("two", _ask("c", new=5)) is None
        refusal = await relay.ask("two", _ask("d", new=1))
        assert refusal is not None
        assert "2 requests are under way" in refusal.message

    asyncio.run(life())


def test_a_request_larger_than_the_limit_runs_alone() -> None:
    async def life() -> None:
        relay = await _ready(_Clock(), max_tokens=5)
        assert await relay.ask("one", _ask("a")) is None

    asyncio.run(life())


def test_what_is_withdrawn_is_stopped_once_and_says_no_more() -> None:
    async def life() -> None:
        relay = await _ready(_Clock())
        await relay.ask("one", _ask("a"))
        await relay.take(0.01)
        await relay.withdraw("a")
        await relay.withdraw("a")
        assert await relay.take(0.01) == ["a"]
        await relay.deliver([Piece(request="a", tokens=(1,), end="finished")])
        assert await relay.pieces("one", 0.01) == []
        assert (await relay.snapshot()).running_tokens == 0

    asyncio.run(life())


def test_the_requests_of_a_lost_client_are_stopped() -> None:
    async def life() -> None:
        clock = _Clock()
        relay = await _ready(clock)
        await relay.ask("dead", _ask("a"))
        await relay.take(0.01)
        clock.now = CLIENT_LOST_S + 1
        assert await relay.take(0.01) == ["a"]

    asyncio.run(life())


def test_nothing_is_taken_on_before_the_fleet_is_ready_or_once_its_holder_is_silent() -> None:
    async def life() -> None:
        clock = _Clock()
        early = Relay(max_requests=1, max_tokens=100, clock=clock)
        refusal = await early.ask("one", _ask("a"))
        assert refusal is not None
        assert refusal.kind == UNAVAILABLE
        relay = await _ready(clock)
        clock.now = HOLDER_LOST_S + 1
        refusal = await relay.ask("one", _ask("a"))
        assert refusal is not None
        assert "does not answer" in refusal.message
        await relay.take(0.01)
        assert await relay.ask("one", _ask("a")) is None

    asyncio.run(life())
