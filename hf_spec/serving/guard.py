"""ASGI middleware: access control, body limit, counts, and cancellation on disconnect."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from hf_spec.serving.errors import RequestError
from hf_spec.serving.settings import ServeSettings, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUEST_ID = "x-request-id"
LONGEST_ID = 128
# Paths without API key: a supervisor that restarts the server may not have it.
OPEN_PATHS = ("/health",)


class AccessGuard:
    """Middleware that checks host, origin, API key and body size, and counts the responses.

    A web page can send requests to this machine, and with a DNS name that points here it can also
    read the responses (DNS rebinding). A server on a loopback address therefore accepts only
    loopback names and `allowed_hosts` as host and origin.

    `responses` counts by route and status; each response gets the request id as a header.
    """

    def __init__(self, app: Any, settings: ServeSettings, responses: Counter[tuple[str, int]]):
        self.app, self._settings, self.responses = app, settings, responses
        names = [settings.host, *settings.allowed_hosts]
        self._names = {name.lower().strip("[]") for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or send an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        request_id = headers.get(REQUEST_ID, "")[:LONGEST_ID] or str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
                name = (REQUEST_ID.encode(), request_id.encode("latin-1"))
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        try:
            self._check(headers, scope["path"])
            body = await self._body(headers, receive)
            if body is not None:
                await _serve_until_disconnect(self.app, scope, body, receive, counting_send)
        except RequestError as error:
            response = JSONResponse(error.body, error.status, error.headers)
            await response(scope, receive, counting_send)
        except Exception:
            self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        # All unknown paths share one counter.
        route = getattr(scope.get("route"), "path", "none")
        self.responses[route, status] += 1

    def _check(self, headers: Mapping[str, str], path: str) -> None:
        settings = self._settings
        if is_loopback(settings.host) or settings.allowed_hosts:
            host, origin = headers.get("host", ""), headers.get("origin")
            if not self._is_allowed(f"//{host}"):
                raise RequestError(
                    403,
                    f"Host {host!r:.200} is not a name of this server; start it with "
                    "--allowed-hosts to add it",
                )
            if origin is not None and not self._is_allowed(origin):
                raise RequestError(
                    403,
                    f"Origin {origin!r:.200} is not allowed; start the server with "
                    "--allowed-hosts to add it",
                )
        if settings.api_key is not None and path not in OPEN_PATHS:
            credentials = headers.get("authorization", "")
            expected = f"Bearer {settings.api_key}"
            if not hmac.compare_digest(credentials.encode(), expected.encode()):
                raise RequestError(
                    401,
                    'this server needs an API key: send the header "Authorization: Bearer KEY"',
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _is_allowed(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").lower()
        except ValueError:
            return False
        return is_loopback(name) or name in self._names

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        """Return the whole body, or None if the client disconnects first."""
        limit = self._settings.max_body
        length = headers.get("content-length", "")
        size = int(length) if length.isdecimal() else 0
        body = bytearray()
        more = True
        while more and size <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            size = len(body)
            more = message.get("more_body", False)
        if size > limit:
            raise RequestError(
                413,
                f"the body has more than {limit} bytes; send less, or start the server with "
                "a larger --max-body",
                # The rest of the body stays unread.
                headers={"Connection": "close"},
            )
        return bytes(body)


async def _serve_until_disconnect(
    app: Any, scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    disconnected = asyncio.Event()
    unread, complete = [body], False

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def tracking_send(message: Message) -> None:
        nonlocal complete
        await send(message)
        complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()

    response = asyncio.ensure_future(app(scope, replay, tracking_send))
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({response, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not response.done() and not complete:
            response.cancel()
            with suppress(asyncio.CancelledError):
                await response
            return
        await response
    finally:
        watcher.cancel()
        response.cancel()
