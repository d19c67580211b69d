"""What every request passes first, before any of it is read: its size, and its key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from cluster.gateway.errors import ApiError
from cluster.gateway.keys import key_is_known

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_GUARDED = "/v1/"


class Guard:
    """An ASGI layer. Bodies beyond max_body bytes end with 413, /v1/ without a known key with 401."""

    def __init__(self, app: App, *, max_body: int, key_hashes: tuple[bytes, ...]) -> None:
        self._app = app
        self._max_body = max_body
        self._key_hashes = key_hashes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, str]) -> ApiError | None:
        if path.startswith(_GUARDED) and not key_is_known(headers.get(b"authorization"), self._key_hashes):
            return ApiError(
                401, "no API key of this cluster was given (header 'Authorization: Bearer KEY')", code="invalid_api_key"
            )
        length = headers.get(b"content-length", "0")
        return self._too_large() if length.isdecimal() and int(length) > self._max_body else None

    def _counted(self, receive: Receive) -> Receive:
        """A body may come in chunks without saying its length: count what comes."""
        taken = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="request_too_large")
