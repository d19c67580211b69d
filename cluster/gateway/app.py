"""The gateway's HTTP application: OpenAI's routes, and those that operators ask."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from cluster.gateway.answers import Form, model_card, prometheus_text, sse, usage_of
from cluster.gateway.desk import Desk
from cluster.gateway.errors import ApiError, from_validation
from cluster.gateway.guard import Guard
from cluster.gateway.prompts import chat_prompt, completion_prompt
from cluster.gateway.protocol import DEFAULT_COMPLETION_TOKENS, LONGEST_SESSION, ChatBody, CompletionBody
from cluster.gateway.relay import Ask, Piece
from cluster.gateway.text_stream import TextStream
from placement.errors import RequestError
from workers.requests import GenerationRequest, check_request

SESSION_HEADER = "x-session-id"
_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What a replica must know. context: tokens that prompt and answer may have together. end_tokens: those that end an
    answer."""

    model: str
    vocabulary: int
    context: int
    end_tokens: frozenset[int]
    default_max_tokens: int
    max_body: int
    created: int
    key_hashes: tuple[bytes, ...] = field(default=(), repr=False)


class Gateway:
    """One replica's answers to clients."""

    def __init__(self, settings: GatewaySettings, desk: Desk, tokenizer: Any) -> None:
        self._settings = settings
        self._desk = desk
        self._tokenizer = tokenizer

    # ------------------------------------------------------------------------------------------------------- routes

    async def models(self, request: Request) -> Response:
        card = model_card(self._settings.model, self._settings.created)
        return JSONResponse({"object": "list", "data": [card]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(model_card(self._settings.model, self._settings.created))

    async def completions(self, request: Request) -> Response:
        body = await _parse(request, CompletionBody)
        self._check_model(body.model)
        prompt = await asyncio.to_thread(completion_prompt, self._tokenizer, body.prompt)
        return await self._answer(request, body, prompt, body.new_tokens or DEFAULT_COMPLETION_TOKENS, chat=False)

    async def chat(self, request: Request) -> Response:
        body = await _parse(request, ChatBody)
        self._check_model(body.model)
        prompt = await asyncio.to_thread(chat_prompt, self._tokenizer, body.messages)
        room = self._settings.context - len(prompt)
        new_tokens = body.new_tokens or max(1, min(room, self._settings.default_max_tokens))
        return await self._answer(request, body, prompt, new_tokens, chat=True)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        state = (await self._desk.snapshot()).state
        if not state.ready:
            raise ApiError(503, f"not ready: {state.reason}")
        return JSONResponse({"status": "ready", "epoch": state.epoch, "ranks": state.ranks})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(prometheus_text(await self._desk.snapshot()))

    # ------------------------------------------------------------------------------------------------------ answers

    async def _answer(
        self, request: Request, body: CompletionBody | ChatBody, prompt: tuple[int, ...], new_tokens: int, *, chat: bool
    ) -> Response:
        form = Form(
            name=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            created=int(time.time()),
            model=self._settings.model,
            chat=chat,
        )
        ask = Ask(
            request=self._generation(form, body, prompt, new_tokens),
            session=body.user or request.headers.get(SESSION_HEADER, "")[:LONGEST_SESSION] or None,
        )
        text = TextStream(self._tokenizer, body.stops)
        async with AsyncExitStack() as stack:
            pieces = await stack.enter_async_context(self._desk.serve(ask))
            if body.stream:
                # The first piece decides: until it is there, a failure is still a status of its own.
                first = await anext(pieces)
                _check(first)
                events = self._stream(form, ask, text, first, pieces, stack.pop_all(), usage=body.wants_usage)
                return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
            shown = ""
            finish = None
            async for piece in pieces:
                _check(piece)
                more, finish = self._read(ask, text, piece)
                shown += more
                if finish is not None:
                    break
            assert finish is not None
            return JSONResponse(form.whole(shown, finish, usage_of(len(prompt), text.num_tokens)))

    async def _stream(
        self,
        form: Form,
        ask: Ask,
        text: TextStream,
        first: Piece,
        pieces: AsyncIterator[Piece],
        stack: AsyncExitStack,
        *,
        usage: bool,
    ) -> AsyncIterator[str]:
        async with stack:
            yield sse(form.chunk("" if form.chat else None, first=True))
            piece: Piece | None = first
            finish = None
            while piece is not None and finish is None:
                if piece.end not in (None, "finished"):
                    yield sse(_failure(piece).body())
                    return
                more, finish = self._read(ask, text, piece)
                if more:
                    yield sse(form.chunk(more))
                piece = None if finish is not None else await anext(pieces, None)
            yield sse(form.chunk(None, finish))
            if usage:
                yield sse(form.usage_chunk(usage_of(len(ask.request.prompt), text.num_tokens)))
            yield sse("[DONE]")

    def _read(self, ask: Ask, text: TextStream, piece: Piece) -> tuple[str, str | None]:
        """The text that a piece adds, and why the answer ends with it: 'stop', 'length', or None where it goes on."""
        shown = ""
        for token in piece.tokens:
            shown += text.feed(token)
            if text.stopped:
                return shown, "stop"
        if piece.end is None:
            return shown, None
        shown += text.finish()
        ended = text.stopped or (bool(piece.tokens) and piece.tokens[-1] in self._settings.end_tokens)
        return shown, "stop" if ended else "length"

    def _generation(
        self, form: Form, body: CompletionBody | ChatBody, prompt: tuple[int, ...], new_tokens: int
    ) -> GenerationRequest:
        settings = self._settings
        if len(prompt) + new_tokens > settings.context:
            raise ApiError(
                400,
                f"this model's context is {settings.context} tokens; {len(prompt)} of the prompt and {new_tokens} of "
                f"the answer are {len(prompt) + new_tokens}",
                param="max_tokens" if len(prompt) < settings.context else "messages" if form.chat else "prompt",
                code="context_length_exceeded",
            )
        generation = GenerationRequest(
            request=form.name,
            prompt=prompt,
            max_new_tokens=new_tokens,
            stream=bool(body.stream) or bool(body.stops),
            sampling=body.sampling(),
        )
        try:
            check_request(generation, vocabulary=settings.vocabulary, max_tokens=settings.context)
        except RequestError as error:
            reason = str(error).removeprefix(f"request '{form.name}': ")
            raise ApiError(400, reason, param="messages" if form.chat else "prompt", code="invalid_value") from error
        return generation

    def _check_model(self, name: str) -> None:
        if name != self._settings.model:
            raise ApiError(
                404,
                f"the model '{name[:80]}' does not exist; this cluster serves '{self._settings.model}'",
                param="model",
                code="model_not_found",
            )


def make_app(gateway: Gateway, settings: GatewaySettings) -> FastAPI:
    """The routes, with every error in OpenAI's form."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("GET", "/v1/models", gateway.models),
        ("GET", "/v1/models/{name:path}", gateway.model),
        ("POST", "/v1/completions", gateway.completions),
        ("POST", "/v1/chat/completions", gateway.chat),
        ("GET", "/health", gateway.health),
        ("GET", "/ready", gateway.ready),
        ("GET", "/metrics", gateway.metrics),
    ]
    for method, path, endpoint in routes:
        app.add_route(path, endpoint, methods=[method])

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        headers = {"retry-after": "1"} if error.status in (429, 503) else {}
        return JSONResponse(error.body(), error.status, headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"{error.detail}: {request.method} {request.url.path[:80]}"
        return JSONResponse(ApiError(error.status_code, reason).body(), error.status_code)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_middleware(Guard, max_body=settings.max_body, key_hashes=settings.key_hashes)
    return app


async def _parse(request: Request, body: type[_Body]) -> _Body:
    try:
        return body.model_validate_json(await request.body())
    except ValidationError as error:
        raise from_validation(error) from error


def _check(piece: Piece) -> None:
    """Raises ApiError where the request did not go well."""
    if piece.end not in (None, "finished"):
        raise _failure(piece)


def _failure(piece: Piece) -> ApiError:
    return ApiError(503, piece.error or f"the request was {piece.end}")
