"""HTTP endpoints: which exist, and for which model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.conftest import Served, plain

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import httpx2
import openai
import pydantic

from hf_spec.serving.routes import ChatRequest, CompletionRequest, ResponseRequest, TextRequest

CHAT = {"messages": [{"role": "user", "content": "babebi"}], "max_tokens": 2}


def test_the_schema_has_every_endpoint_and_its_fields(served: Served) -> None:
    schema = httpx2.get(f"{served.url}/openapi.json").json()
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/metrics"}
    assert paths < schema["paths"].keys()
    assert {"/reset", "/load_model"}.isdisjoint(schema["paths"])
    fields = schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_tokens", "logit_bias", "temperature", "n"} < fields.keys()


def test_what_does_not_exist_has_an_error_of_the_same_form(served: Served) -> None:
    for response, status in (
        (httpx2.get(f"{served.url}/made/up"), 404),
        (httpx2.get(f"{served.url}/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


class TestModels:
    def test_the_served_one_is_listed(self, served: Served) -> None:
        [model] = served.client.models.list().data
        assert model.id == served.model
        assert served.client.models.retrieve(served.model).id == served.model

    @pytest.mark.parametrize("name", ["another", "", "/tmp", "a/b@c", "x" * 9999, "😀"])
    def test_any_other_is_not_found(self, served: Served, name: str) -> None:
        with pytest.raises(openai.NotFoundError) as found:
            served.client.chat.completions.create(model=name, messages=CHAT["messages"])
        assert found.value.code == "model_not_found"
        assert found.value.param == "model"
        for path, body in (
            ("completions", {"prompt": "ba"}),
            ("responses", {"input": "ba"}),
            ("chat/completions", {**CHAT, "stream": True}),
        ):
            given = {"model": name, **body}
            assert httpx2.post(f"{served.url}/v1/{path}", json=given).status_code == 404

    def test_nor_for_audio(self, served: Served) -> None:
        pytest.importorskip("python_multipart", reason="needs python-multipart")
        url = f"{served.url}/v1/audio/transcriptions"
        file = {"file": ("a.wav", b"RIFF")}
        assert httpx2.post(url, data={"model": "/tmp"}, files=file).status_code == 404
        own = httpx2.post(url, data={"model": served.model}, files=file)
        assert own.status_code == 400
        assert "does not support transcription" in own.json()["error"]["message"]
        assert httpx2.post(url, data={"model": served.model}).status_code == 400

    def test_nor_for_decisions(self, served: Served) -> None:
        body = {"model": "another", "state": "a", "questions": {"q": {}}}
        response = httpx2.post(f"{served.url}/v1/systemone", json=body)
        assert response.status_code == 404

    def test_no_name_means_the_served_one(self, served: Served) -> None:
        for body in (CHAT, {**CHAT, "model": None}):
            response = httpx2.post(f"{served.url}/v1/chat/completions", json=body)
            assert response.json()["choices"][0]["message"]["content"] == plain("babebi", 2)


class TestManagement:
    def test_is_off(self, served: Served) -> None:
        for path, body in (("/reset", {}), ("/load_model", {"model": served.model})):
            for headers in ({}, {"Content-Type": "text/plain", "Origin": "http://evil.example"}):
                response = httpx2.post(f"{served.url}{path}", json=body, headers=headers)
                assert response.status_code in (403, 404)
        assert served.text() == plain("babebi")

    def test_reset_ends_what_runs_with_an_error_and_loads_again(
        self, start: Callable[..., Served]
    ) -> None:
        served = start(management=True)
        stream = served.ask("babebi", max_tokens=240, stream=True)
        next(iter(stream))
        assert httpx2.post(f"{served.url}/reset").json() == {"status": "ok"}
        with pytest.raises(openai.APIError):
            list(stream)
        assert httpx2.get(f"{served.url}/health").status_code == 200
        assert served.text() == plain("babebi")

    def test_no_other_model_is_loaded(self, start: Callable[..., Served]) -> None:
        served = start(management=True)
        url = f"{served.url}/load_model"
        for name in ("/tmp", "another", None, 5):
            assert httpx2.post(url, json={"model": name}).status_code == 404
        assert '"ready"' in httpx2.post(url, json={"model": served.model}).text


BODY = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**BODY, "stop": None, "n": 1, "temperature": 0, "seed": -1}),
        (ChatRequest, {**BODY, "logit_bias": {"5": -100}, "stop": ["a", "b"], "user": "me"}),
        (ChatRequest, {"messages": [{"role": "tool", "content": [{"type": "text"}], "id": 5}]}),
        (CompletionRequest, {"prompt": "", "suffix": "x", "max_tokens": 1}),
        (ResponseRequest, {"input": [{"role": "user"}], "instructions": "x"}),
    ],
)
def test_a_body_reaches_the_handler_as_it_came(
    kind: type[TextRequest], body: dict[str, Any]
) -> None:
    assert kind.model_validate(body).model_dump(exclude_unset=True) == body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {}),
        (ChatRequest, {**BODY, "max_tokens": "5"}),
        (ChatRequest, {**BODY, "max_tokens": float("inf")}),
        (ChatRequest, {**BODY, "stream": 1}),
        (ChatRequest, {**BODY, "temperature": True}),
        (CompletionRequest, {"prompt": 5}),
        (CompletionRequest, {"prompt": "a", "best_of": 2}),
        (ResponseRequest, {"input": []}),
        (ResponseRequest, {"input": "a", "parallel_tool_calls": None}),
    ],
)
def test_types_are_not_converted(kind: type[TextRequest], body: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        kind.model_validate(body)
