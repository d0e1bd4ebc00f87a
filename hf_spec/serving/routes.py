"""Endpoints of the server, and their bodies.

FastAPI validates the bodies and builds `/openapi.json` from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import split_model_id

from hf_spec.serving.checks import MAX_NUMBER
from hf_spec.serving.errors import RequestError
from hf_spec.serving.guard import AccessGuard
from hf_spec.serving.handlers import (
    Chat,
    Completions,
    Responses,
    ServedModel,
    Transcriptions,
    decisions,
)
from hf_spec.serving.manager import SpeculativeManager
from hf_spec.serving.metrics import CONTENT_TYPE, Counts, prometheus_text

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "Invalid request, or too large for the server."},
    "5XX": {"description": "Failure or shutdown of the server."},
}


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


def build_app(model: ServedModel, manager: SpeculativeManager) -> FastAPI:
    """Return the app for a model opened by `manager`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        manager.readers.shutdown(wait=False, cancel_futures=True)
        model.shutdown()

    app = FastAPI(title="hf-spec serve", lifespan=lifespan, responses=ERRORS)
    _add_text(app, model, manager)
    _add_service(app, model, manager)
    if manager.settings.management:
        _add_management(app, model, manager)
    app.add_exception_handler(RequestError, _respond)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failure)
    return app


def _add_text(app: FastAPI, model: ServedModel, manager: SpeculativeManager) -> None:
    chat, completion = Chat(model, manager), Completions(model, manager)
    response, transcription = Responses(model, manager), Transcriptions(model, manager)
    decision = decisions(model, manager)

    def fields(body: Any) -> dict[str, Any]:
        return body.model_dump(exclude_unset=True)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await chat.handle_request(fields(body), request.state.request_id)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await completion.handle_request(fields(body), request.state.request_id)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponseRequest) -> Response:
        return await response.handle_request(fields(body), request.state.request_id)

    @app.post("/v1/audio/transcriptions")
    async def audio_transcriptions(request: Request) -> Response:
        return await transcription.handle_request(request)

    if decision is not None:

        @app.post("/v1/systemone")
        async def systemone(request: Request, body: dict[str, Any]) -> Response:
            return await decision.handle_request(body, request.state.request_id)


def _add_service(app: FastAPI, model: ServedModel, manager: SpeculativeManager) -> None:
    num_responses: Counter[tuple[str, int]] = Counter()
    app.add_middleware(AccessGuard, settings=manager.settings, responses=num_responses)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.description]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        # Clients may merge the leading slash of an absolute path with the one before it.
        model.check(model.name if name == model.name.lstrip("/") else name)
        return model.description

    @app.get("/health")
    async def health() -> Response:
        alive = manager.is_alive
        return JSONResponse({"status": "ok" if alive else "unhealthy"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        # Read once: a reset in another thread removes it.
        scheduler = manager.scheduler
        counts = Counts() if scheduler is None else scheduler.counts
        return Response(prometheus_text(counts, num_responses), media_type=CONTENT_TYPE)


def _add_management(app: FastAPI, model: ServedModel, manager: SpeculativeManager) -> None:
    @app.post("/load_model")
    async def load_model(body: dict[str, Any]) -> Response:
        model.check(body.get("model"))
        repository, gguf_file = split_model_id(model.name)
        options = {} if gguf_file is None else {"gguf_file": gguf_file}
        progress = model.load_model_streaming(model.process_model_name(repository), **options)
        return StreamingResponse(progress, media_type="text/event-stream")

    @app.post("/reset")
    def reset() -> dict[str, str]:
        manager.close()
        model.shutdown()
        return {"status": "ok"}


async def _respond(request: Any, error: Any) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _invalid_body(request: Any, error: Any) -> Response:
    first = error.errors()[0]
    # `loc` also names the alternatives of a union type, with brackets.
    field = ".".join(str(part) for part in first["loc"][1:] if "[" not in str(part))
    value = f", not {first['input']!r:.60}" if "input" in first else ""
    message = f"{field or 'the body'}: {first['msg']}{value}"
    return await _respond(request, RequestError(400, message, param=field or None))


async def _http_error(request: Any, error: Any) -> Response:
    message = error.detail if isinstance(error.detail, str) else repr(error.detail)
    return await _respond(request, RequestError(error.status_code, message, headers=error.headers))


async def _failure(request: Any, error: Any) -> Response:
    # The client gets only the message; the traceback is in the log. uvicorn closes the connection,
    # so tell the client not to reuse it.
    message, headers = f"{type(error).__name__}: {error}", {"Connection": "close"}
    return await _respond(request, RequestError(500, message, headers=headers))
