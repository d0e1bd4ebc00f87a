"""transformers' own app and routes, with `/metrics` and errors that name the client's mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from transformers.utils.import_utils import is_serve_available

from hf_spec.errors import OptionError
from hf_spec.installing import how_to_install
from hf_spec.serving.counts import CONTENT_TYPE, prometheus_text
from hf_spec.serving.manager import SpeculativeManager, SpeculativeState
from hf_spec.serving.scheduler import QueueFullError

# Of uvicorn, when it is told to stop: how long answers may go on, in seconds.
GRACE_SECONDS = 5

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def check_packages() -> None:
    """Refuse where transformers' server cannot run for lack of packages."""
    if not is_serve_available():
        raise OptionError(
            "transformers' server needs fastapi, uvicorn and openai: " + how_to_install("serve")
        )


def build_app(model_manager: Any, manager: SpeculativeManager) -> Any:
    """The FastAPI app for the model that `model_manager` was told to preload.

    Args:
        model_manager: transformers' `ModelManager` with `force_model`.
        manager: generates the answers; gets the model here.

    Raises:
        SpecError: if the model cannot be served.
    """
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler

    [loaded] = model_manager.loaded_models.values()
    manager.open(loaded.model, loaded.processor)
    state = SpeculativeState(manager)
    made = {
        f"{name}_handler": kind(model_manager, state)
        for name, kind in {
            "chat": ChatCompletionHandler,
            "completion": CompletionHandler,
            "response": ResponseHandler,
            "systemone": SystemOneHandler,
            "transcription": TranscriptionHandler,
        }.items()
    }
    app = build_server(model_manager, generation_state=state, **made)
    _add_metrics(app, manager)
    # What a handler cannot read in the body of a request; by itself it would be a status 500,
    # which clients take for a reason to try again.
    for kind in (KeyError, TypeError, ValueError):
        app.add_exception_handler(kind, _bad_request)
    app.add_exception_handler(QueueFullError, _too_many_requests)
    return app


def make_server(app: Any, host: str, port: int) -> Any:
    """The uvicorn server that runs the app until it is told to stop."""
    import uvicorn

    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS
    )
    return uvicorn.Server(config)


def _add_metrics(app: Any, manager: SpeculativeManager) -> None:
    from fastapi import Response

    responses: Counter[tuple[str, int]] = Counter()
    app.add_middleware(_ResponseCounter, responses=responses)

    @app.get("/metrics")
    def metrics() -> Response:
        scheduler = manager.scheduler
        text = prometheus_text(scheduler.counts, scheduler.load, responses)
        return Response(text, media_type=CONTENT_TYPE)


async def _bad_request(request: Any, error: Exception) -> Any:
    # Of a missing key the message is no more than its name.
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return _refusal(400, "invalid_request_error", said)


async def _too_many_requests(request: Any, error: Exception) -> Any:
    return _refusal(429, "rate_limit_error", str(error), {"Retry-After": "1"})


def _refusal(status: int, kind: str, said: str, headers: dict[str, str] | None = None) -> Any:
    """An error in OpenAI's shape, whose message its client shows."""
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": {"message": said, "type": kind}}, status, headers)


class _ResponseCounter:
    """Middleware that counts responses by route and status."""

    def __init__(self, app: Any, responses: Counter[tuple[str, int]]):
        self.app, self.responses = app, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, watched if scope["type"] == "http" else send)
        except Exception:
            self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        # Whoever asks for made-up paths makes no new lines.
        route = getattr(scope.get("route"), "path", "none")
        self.responses[route, status] += 1
