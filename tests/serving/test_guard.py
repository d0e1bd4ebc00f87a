"""Access control of a server: host names, origins, and API keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import Served, starting

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import httpx2
import openai

from hf_spec.serving.guard import AccessGuard
from hf_spec.serving.settings import ServeSettings

CHAT = {"messages": [{"role": "user", "content": "babebi"}], "max_tokens": 2}


def status(served: Served, headers: dict[str, str], path: str = "/v1/models") -> int:
    return httpx2.get(f"{served.url}{path}", headers=headers).status_code


class TestHostAndOrigin:
    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "[::1"])
    def test_a_name_that_is_not_the_servers(self, served: Served, host: str) -> None:
        response = httpx2.get(f"{served.url}/v1/models", headers={"Host": host})
        assert response.status_code == 403
        assert "--allowed-hosts" in response.json()["error"]["message"]

    @pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:80", "LocalHost"])
    def test_loopback_names_are_the_servers(self, served: Served, host: str) -> None:
        assert status(served, {"Host": host}) == 200

    def test_pages_of_others_may_not_ask(self, served: Served) -> None:
        url = f"{served.url}/v1/chat/completions"
        for origin in ("http://evil.example", "null", "http://[", "https://localhost.evil.example"):
            assert httpx2.post(url, json=CHAT, headers={"Origin": origin}).status_code == 403
        for origin in ("http://localhost:3000", "http://127.0.0.1", served.url):
            assert httpx2.post(url, json=CHAT, headers={"Origin": origin}).status_code == 200

    def test_a_name_that_was_allowed(self, start: Callable[..., Served]) -> None:
        served = start(allowed_hosts=("ai.example",))
        allowed = {"Host": "ai.example:8000", "Origin": "https://ai.example"}
        assert status(served, allowed) == 200
        for host in ("other.example", "not-ai.example", "ai.example.evil"):
            assert status(served, {"Host": host}) == 403
        assert status(served, {}) == 200

    def test_a_server_for_other_machines_has_any_name(self, start: Callable[..., Served]) -> None:
        served = start(host="0.0.0.0")
        assert status(served, {"Host": "any.example"}) == 200


class TestKey:
    @pytest.fixture(scope="class")
    def locked(self, folder: Path) -> Iterator[Served]:
        with starting(folder) as begin:
            yield begin(api_key="Schlüssel")

    @pytest.mark.parametrize("given", [None, "Bearer other", "Schlüssel", "Bearer Schlüssel2"])
    def test_is_needed(self, locked: Served, given: str | None) -> None:
        headers = {} if given is None else {"Authorization": given.encode().decode("latin-1")}
        for path in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/made/up"):
            response = httpx2.get(
                f"{locked.url}{path}",
                headers={name: value.encode("latin-1") for name, value in headers.items()},
            )
            assert response.status_code == 401
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")

    def test_opens_the_server(self, start: Callable[..., Served]) -> None:
        served = start(api_key="secret")
        assert status(served, {"Authorization": "Bearer secret"}) == 200
        assert status(served, {}, "/health") == 200
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0)
        assert client.models.list().data[0].id == served.model
        with pytest.raises(openai.AuthenticationError, match="needs an API key"):
            served.ask()


def test_every_response_has_the_id_of_its_request(served: Served) -> None:
    def of(given: dict[str, str]) -> Any:
        return httpx2.get(f"{served.url}/health", headers=given).headers["x-request-id"]

    assert of({"X-Request-Id": "mine"}) == "mine"
    assert len(of({})) == 36
    assert len(of({"X-Request-Id": "x" * 9999})) == 128


@pytest.mark.parametrize("sizes", [(60, 60, 0), (60, 60), (120,)], ids=str)
def test_the_parts_of_a_body_have_one_limit(sizes: tuple[int, ...]) -> None:
    """Over a network, the number of parts that are read at once depends on timing."""
    more = [True] * (len(sizes) - 1) + [False]
    parts = (
        {"type": "http.request", "body": b" " * size, "more_body": later}
        for size, later in zip(sizes, more, strict=True)
    )
    sent: list[Any] = []

    async def app(*arguments: Any) -> None:
        raise AssertionError("a body of 120 bytes was accepted")

    async def receive() -> Any:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    guard = AccessGuard(app, ServeSettings(max_body=100), Counter())
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"host", b"127.0.0.1")]}
    asyncio.run(guard(scope, receive, send))
    assert sent[0]["status"] == 413
