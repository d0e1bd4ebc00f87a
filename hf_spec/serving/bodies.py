"""Request bodies; FastAPI validates them and builds `/openapi.json` from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from hf_spec.serving.checks import MAX_NUMBER

Text: TypeAlias = Annotated[str, Field(strict=True)]
Whole: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MAX_NUMBER)]
# The list length is checked against the server settings.
Stop: TypeAlias = Text | list[Text] | None


def _number(low: float, high: float) -> Any:
    return Field(default=None, strict=True, ge=low, le=high, allow_inf_nan=False)


class TextRequest(BaseModel):
    """Fields of all text endpoints; the handlers reject unknown fields."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = None
    stream: Annotated[bool, Field(strict=True)] | None = None
    temperature: float | None = _number(0, 100)
    top_p: float | None = _number(0, 1)
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    generation_config: Annotated[Text, Field(description="JSON of a GenerationConfig")] | None = (
        None
    )
    # One completion per request.
    n: Literal[1] | None = None


class Message(BaseModel):
    """Message of a chat; chat templates may use further fields."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Text | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatRequest(TextRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    # transformers adds 1 and uses it as repetition penalty, which must be positive.
    frequency_penalty: float | None = _number(-0.99, 2)
    logit_bias: (
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(strict=True, ge=-100, le=100, allow_inf_nan=False)],
        ]
        | None
    ) = None
    stop: Stop = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(TextRequest):
    """Body of `/v1/completions`."""

    prompt: Text
    suffix: Text | None = None
    max_tokens: Whole | None = None
    frequency_penalty: float | None = _number(-0.99, 2)
    stop: Stop = None
    best_of: Literal[1] | None = None


class ResponseRequest(TextRequest):
    """Body of `/v1/responses`."""

    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Whole | None = None
    parallel_tool_calls: Annotated[bool, Field(strict=True)] = False
    tools: list[dict[str, Any]] | None = None
