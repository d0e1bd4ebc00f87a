"""Random requests generated from `/openapi.json` never cause a server error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.conftest import Served, folder, plain, starting  # noqa: F401 - a fixture

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")
pytest.importorskip("schemathesis", reason="needs the extra 'test'")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies

from hf_spec.serving.routes import ChatRequest, CompletionRequest, ResponseRequest, TextRequest

pytestmark = pytest.mark.integration

# A random string is hardly ever valid JSON.
FIELDS = TextRequest.model_fields.keys() - {"generation_config"}
ROUTES = {
    "/v1/chat/completions": ChatRequest.model_fields,
    "/v1/completions": CompletionRequest.model_fields,
    "/v1/responses": ResponseRequest.model_fields,
}

EXAMPLES = 60


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:  # noqa: F811
    """Start a server with short answers and every endpoint."""
    with starting(folder) as begin:
        yield begin(max_length=24, max_batch=4, management=True)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=strategies.data())
def check(operation: Any, statuses: set[int], data: Any) -> None:
    case = data.draw(operation.as_strategy())
    response = case.call(timeout=60)
    assert response.status_code < 500, response.text
    statuses.add(response.status_code)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


@pytest.mark.full
def test_no_request_is_a_failure_of_the_server(served: Served) -> None:
    # Without schemathesis's test decorator, which reads a private attribute of pytest.
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    found: dict[str, set[int]] = {}
    for operation in (result.ok() for result in schema.get_all_operations()):
        check(operation, found.setdefault(operation.path, set()))
    assert {"/v1/chat/completions", "/v1/audio/transcriptions", "/reset"} < found.keys()
    assert 200 in found["/v1/models"]
    assert found["/v1/chat/completions"] <= {400, 404, 422}, "a random model is not the served one"


@pytest.mark.full
def test_with_the_name_of_the_model(served: Served) -> None:
    """Requests with the served model's name reach the model; random names are rejected."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    found: dict[str, set[int]] = {}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        operation = schema[path]["POST"]
        strategy = operation.as_strategy().map(partial(named, served.model))
        check(SimpleNamespace(as_strategy=lambda s=strategy: s), found.setdefault(path, set()))
    assert 200 in found["/v1/completions"]


def named(model: str, case: Any) -> Any:
    """Return the case for the served model, without fields unknown to the endpoint."""
    known = FIELDS | (ROUTES[case.operation.path].keys() - TextRequest.model_fields.keys())
    body = case.body if isinstance(case.body, dict) else {}
    case.body = {name: value for name, value in body.items() if name in known}
    case.body["model"] = model
    if isinstance(prompt := case.body.get("prompt"), str):
        # Random text alone has no token of the tokenizer; these syllables are tokens.
        case.body["prompt"] = f"baba{prompt}"
    return case


def test_it_answers_as_before(served: Served) -> None:
    assert served.text("babe", max_tokens=8) == plain("babe", 8)
    assert served.metric('requests_total{outcome="answered"}') > 0
