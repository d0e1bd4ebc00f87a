"""Fields of requests; what servers answer to wrong ones is tested with their checks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs the extra 'serve'")

import pydantic

from hf_spec.serving.bodies import ChatRequest, CompletionRequest, ResponseRequest, TextRequest

CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**CHAT, "stop": None, "n": 1, "temperature": 0, "seed": -1}),
        (ChatRequest, {**CHAT, "logit_bias": {"5": -100}, "stop": ["a", "b"], "user": "me"}),
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
        (ChatRequest, {**CHAT, "max_tokens": "5"}),
        (ChatRequest, {**CHAT, "max_tokens": float("inf")}),
        (ChatRequest, {**CHAT, "stream": 1}),
        (ChatRequest, {**CHAT, "temperature": True}),
        (CompletionRequest, {"prompt": 5}),
        (CompletionRequest, {"prompt": "a", "best_of": 2}),
        (ResponseRequest, {"input": []}),
        (ResponseRequest, {"input": "a", "parallel_tool_calls": None}),
    ],
)
def test_types_are_not_converted(kind: type[TextRequest], body: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        kind.model_validate(body)
