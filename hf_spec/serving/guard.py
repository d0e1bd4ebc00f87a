"""ASGI middleware around the endpoints: who may ask, how much, and when a client has left."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from hf_spec.serving.errors import RequestError
from hf_spec.serving.settings import ServeSettings, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUEST_ID = "x-request-id"
LONGEST_ID = 128
# The one path that needs no key: whoever restarts a server that has ended may not have it.
OPEN_PATHS = ("/health",)


class ResponseCounter:
    """Counts responses by route and status, and gives each the id of its request."""

    def __init__(self, app: Any, responses: Counter[tuple[str, int]]):
        self.app, self.responses = app, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _headers(scope).get(REQUEST_ID, "")[:LONGEST_ID] or str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
                name = (REQUEST_ID.encode(), request_id.encode("latin-1"))
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        # Requests to unknown paths add no lines.
        route = getattr(scope.get("route"), "path", "none")
        self.responses[route, status] += 1


class AccessGuard:
    """Checks the host, the origin and the key of a request, and the size of its body.

    A page in a browser can send requests to this machine, and with a DNS name of its own that
    points here it can read the answers. A server on a loopback address is therefore only known by
    loopback names and by those that the settings allow, and pages of others may not ask it.
    """

    def __init__(self, app: Any, settings: ServeSettings):
        self.app, self._settings = app, settings
        names = [settings.host, *settings.allowed_hosts]
        self._names = {name.lower().strip("[]") for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await self._body(_headers(scope), receive)
        except RequestError as error:
            await _answer(error, scope, receive, send)
            return
        if body is not None:
            await _until_gone(self.app, scope, body, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, settings = _headers(scope), self._settings
        if settings.is_loopback or settings.allowed_hosts:
            host = _name_of(f"//{headers.get('host', '')}")
            if not self._knows(host):
                raise RequestError(
                    403,
                    f"Host {headers.get('host', '')!r:.200} is not a name of this server; start "
                    "it with --allowed-hosts to add one",
                )
            origin = headers.get("origin")
            if origin is not None and not self._knows(_name_of(origin)):
                raise RequestError(
                    403,
                    f"Origin {origin!r:.200} may not ask this server; start it with "
                    "--allowed-hosts to add one",
                )
        if settings.api_key is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "")
            expected = f"Bearer {settings.api_key}"
            if not hmac.compare_digest(given.encode(), expected.encode()):
                raise RequestError(
                    401,
                    'this server needs an API key: send the header "Authorization: Bearer KEY"',
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _knows(self, name: str) -> bool:
        return is_loopback(name) or name in self._names

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        """Return the whole body, or None if the client leaves before its end."""
        limit = self._settings.max_body
        length = headers.get("content-length", "")
        size = int(length) if length.isdecimal() else 0
        parts = []
        more = True
        while more:
            if size > limit:
                raise RequestError(
                    413,
                    f"the body has more than {limit} bytes; send less, or start the server with "
                    "a larger --max-body",
                    # The rest of the body is not read.
                    headers={"Connection": "close"},
                )
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size = sum(map(len, parts))
            more = message.get("more_body", False)
        return b"".join(parts)


async def _until_gone(app: Any, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Serve a request; cancel it when its client leaves."""
    gone = asyncio.Event()
    unread, complete = [body], False

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watched(message: Message) -> None:
        nonlocal complete
        await send(message)
        complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    answer = asyncio.ensure_future(app(scope, replay, watched))
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({answer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and not complete:
            answer.cancel()
            with suppress(asyncio.CancelledError):
                await answer
            return
        await answer
    finally:
        watcher.cancel()
        answer.cancel()


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _name_of(url: str) -> str:
    """Return the host of a URL, empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


async def _answer(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    from fastapi.responses import JSONResponse

    await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
