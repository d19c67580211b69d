"""The ledger: no token is handed on twice, none is lost, and what goes on is what was asked for."""

from __future__ import annotations

import queue

from hypothesis import given
from hypothesis import strategies as st

from cluster.ledger import MOST_FRUITLESS, Generation, Ledger
from workers.events import FAILED, FINISHED, TokenEvent
from workers.requests import GenerationRequest


def _request(name: str = "a", stream: bool = True, new: int = 10) -> GenerationRequest:
    return GenerationRequest(request=name, prompt=(1, 2), max_new_tokens=new, stream=stream)


def _add(ledger: Ledger, request: GenerationRequest) -> tuple[Generation, queue.SimpleQueue[TokenEvent]]:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    return ledger.add(request, 0, events), events


def _tokens(*tokens: int, end: str | None = None) -> TokenEvent:
    return TokenEvent(request="a", tokens=tokens, end=end)


def _drain(events: queue.SimpleQueue[TokenEvent]) -> list[TokenEvent]:
    found = []
    while not events.empty():
        found.append(events.get())
    return found


def test_what_goes_on_has_its_tokens_in_its_prompt() -> None:
    ledger = Ledger()
    _add(ledger, _request())
    ledger.take(1)
    ledger.deliver(_tokens(5, 6), 1)
    ledger.interrupt()
    ((seat, again),) = ledger.take(2)
    assert (seat, again.prompt, again.max_new_tokens) == (0, (1, 2, 5, 6), 8)


def test_an_event_of_an_earlier_founding_counts_for_nothing() -> None:
    ledger = Ledger()
    _, events = _add(ledger, _request())
    ledger.take(1)
    ledger.interrupt()
    ledger.take(2)
    ledger.deliver(_tokens(5), 1)
    ledger.deliver(_tokens(7, end=FINISHED), 2)
    assert [event.tokens for event in _drain(events)] == [(7,)]


def test_a_request_that_does_not_stream_hears_once() -> None:
    ledger = Ledger()
    _, events = _add(ledger, _request(stream=False))
    ledger.take(1)
    ledger.deliver(_tokens(5, 6), 1)
    ledger.interrupt()
    ledger.take(2)
    ledger.deliver(_tokens(7, end=FINISHED), 2)
    assert [(event.tokens, event.end) for event in _drain(events)] == [((5, 6, 7), FINISHED)]


def test_a_request_that_had_all_its_tokens_is_finished() -> None:
    ledger = Ledger()
    generation, _ = _add(ledger, _request(new=2))
    ledger.take(1)
    ledger.deliver(_tokens(5, 6), 1)
    ledger.interrupt()
    assert ledger.take(2) == []
    assert generation.tokens() == (5, 6)


def test_what_breaks_the_ranks_again_and_again_fails_in_the_end() -> None:
    ledger = Ledger()
    _, events = _add(ledger, _request())
    for founding in range(MOST_FRUITLESS):
        assert ledger.take(founding)
        ledger.interrupt()
    (event,) = _drain(events)
    assert event.end == FAILED
    assert "before it came any further" in (event.error or "")


def test_two_requests_of_one_id_do_not_mix() -> None:
    ledger = Ledger()
    _, first = _add(ledger, _request())
    _, second = _add(ledger, _request())
    assert "a request of this id is running" in (second.get().error or "")
    ledger.take(1)
    ledger.deliver(_tokens(5, end=FINISHED), 1)
    assert first.get().tokens == (5,)


def test_when_nobody_serves_any_more_everything_fails_with_the_reason() -> None:
    ledger = Ledger()
    _, running = _add(ledger, _request())
    ledger.close("too few ranks are left")
    _, late = _add(ledger, _request("b"))
    assert (running.get().error, late.get().error) == ("too few ranks are left",) * 2


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=12), st.booleans())
def test_every_token_is_handed_on_once_and_in_order(steps: list[tuple[int, bool]], stream: bool) -> None:
    """The engine writes 100, 101, ... by the length of what it was given; foundings end at any moment."""
    ledger = Ledger()
    _, events = _add(ledger, _request(stream=stream, new=20))
    founding, written = 0, 0
    ledger.take(founding)
    for count, breaks in steps:
        tokens = tuple(100 + written + number for number in range(min(count, 20 - written)))
        ledger.deliver(TokenEvent(request="a", tokens=tokens), founding)
        written += len(tokens)
        if breaks:
            ledger.interrupt()
            founding += 1
            for _, request in ledger.take(founding):
                assert request.prompt == (1, 2, *(100 + number for number in range(written)))
    ledger.end("a", FINISHED)
    got = [token for event in _drain(events) for token in event.tokens]
    assert got == [100 + number for number in range(written)] or len(ledger) == 0
