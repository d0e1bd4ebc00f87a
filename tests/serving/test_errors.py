"""Errors in OpenAI's format."""

from __future__ import annotations

import json

import pytest

from hf_spec.serving.errors import RequestError, StoppedError


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError(400, "x"), 400, "invalid_request_error"),
        (RequestError(401, "x"), 401, "authentication_error"),
        (RequestError(403, "x"), 403, "permission_error"),
        (RequestError(422, "x"), 422, "invalid_request_error"),
        (RequestError(429, "x"), 429, "rate_limit_error"),
        (StoppedError(), 503, "server_error"),
        (RequestError(500, "x"), 500, "server_error"),
    ],
)
def test_the_type_follows_the_status(error: RequestError, status: int, kind: str) -> None:
    assert error.status == status
    assert error.body["error"]["type"] == kind


def test_the_message_can_be_encoded_whatever_it_quotes() -> None:
    body = RequestError(404, "no model '\ud800'", param="model", code="model_not_found").body
    assert json.loads(json.dumps(body, ensure_ascii=False).encode()) == body
    error = body["error"]
    assert (error["message"], error["param"]) == ("no model '?'", "model")
    assert error["code"] == "model_not_found"
