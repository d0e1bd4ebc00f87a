"""The served model, and transformers' handlers with request parsing in threads.

A handler first renders the chat template, tokenizes, and builds the generation config. Here this
part runs in a thread, so that a slow request does not delay others. It returns a function that
starts the response, which the event loop calls.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import split_model_id

from hf_spec.serving.checks import check_body
from hf_spec.serving.errors import RequestError
from hf_spec.serving.manager import SpeculativeManager

# Errors that invalid request contents raise in handlers, templates and tokenizers. As status 500
# they would make clients retry.
CLIENT_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)


@contextmanager
def content_errors_as_400() -> Iterator[None]:
    """Raise errors about the contents of a request as `RequestError` with status 400."""
    try:
        yield
    except (*CLIENT_ERRORS, RuntimeError) as error:
        # torch raises RuntimeError for invalid tensor values; its subclasses are device errors.
        if not isinstance(error, CLIENT_ERRORS) and type(error) is not RuntimeError:
            raise
        # Other messages are unclear without the type: that of a KeyError is only the key.
        clear = isinstance(error, (ValueError, TemplateError))
        message = str(error) if clear else f"{type(error).__name__}: {error}"
        raise RequestError(400, message) from error


class ServedModel(ModelManager):
    """The model of a server; other names get status 404."""

    def __init__(self, name: str, **options: Any):
        self.name = name
        repository, self._gguf_file = split_model_id(name)
        self._key = self.process_model_name(repository)
        super().__init__(force_model=name, **options)

    def check(self, requested: object) -> None:
        """Raise `RequestError` with status 404 for any name but the served model's."""
        if requested != self.name:
            raise self._not_found(requested)

    def _not_found(self, requested: object) -> RequestError:
        return RequestError(
            404,
            f"the model {requested!r:.200} does not exist; this server serves {self.name!r}",
            param="model",
            code="model_not_found",
        )

    def check_body_model(self, body: dict[str, Any]) -> None:
        """Check the model name in a body, and add it if missing; raises the errors of `check`."""
        if body.get("model") is None:
            body["model"] = self.name
        self.check(body["model"])

    def load_model_and_processor(
        self, model_id_and_revision: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Load the model, or return the loaded one; called by every endpoint."""
        if (model_id_and_revision, kwargs.get("gguf_file")) != (self._key, self._gguf_file):
            raise self._not_found(model_id_and_revision)
        return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)

    @property
    def description(self) -> dict[str, Any]:
        """Entry of the model in `/v1/models`."""
        owner, slash, _ = self.name.strip("/").partition("/")
        owned_by = owner if slash and not self.name.startswith(("/", ".")) else "local"
        return {"id": self.name, "object": "model", "created": 0, "owned_by": owned_by}


class _ParsedInThread:
    """Mixin that runs `handle_request` in a thread until the response starts."""

    model_manager: ServedModel
    generation_state: SpeculativeManager

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        loop, readers = asyncio.get_running_loop(), self.generation_state.readers
        start = await loop.run_in_executor(readers, self._parse, body, request_id)
        response = start()
        return await response if inspect.isawaitable(response) else response

    def _parse(self, body: dict[str, Any], request_id: str) -> Callable[[], Any]:
        with content_errors_as_400():
            self.model_manager.check_body_model(body)
            check_body(body, self.generation_state.settings)
            # Until the response starts, nothing depends on the server's event loop.
            return asyncio.run(super().handle_request(body, request_id))  # type: ignore[misc]

    def _streaming(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        return self._prepare(super()._streaming, args, kwargs)  # type: ignore[misc]

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> Callable[[], Awaitable[Any]]:
        return self._prepare(super()._non_streaming, args, kwargs)  # type: ignore[misc]

    @staticmethod
    def _prepare(
        respond: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        # The argument order differs between handlers, and the arguments between releases.
        arguments = inspect.signature(respond).bind(*args, **kwargs).arguments
        arguments["gen_manager"].prepare(
            *(arguments[name] for name in ("model", "processor", "inputs", "gen_config"))
        )
        return partial(respond, *args, **kwargs)


class Chat(_ParsedInThread, ChatCompletionHandler):  # type: ignore[misc]
    """Handler of `/v1/chat/completions`."""


class Completions(_ParsedInThread, CompletionHandler):  # type: ignore[misc]
    """Handler of `/v1/completions`."""


class Responses(_ParsedInThread, ResponseHandler):  # type: ignore[misc]
    """Handler of `/v1/responses`."""


class Transcriptions(TranscriptionHandler):
    """Transcription handler that rejects audio files: no supported model transcribes."""

    async def handle_request(self, request: Any) -> Any:
        """Return the error of a request."""
        with content_errors_as_400():
            return await super().handle_request(request)

    @staticmethod
    def _prepare_audio_inputs(file_bytes: bytes, audio_processor: Any, audio_model: Any) -> Any:
        raise HTTPException(
            400,
            f"{type(audio_model).__name__} does not support transcription; use `transformers "
            "serve` for speech models",
        )


def decisions(model: ServedModel, manager: SpeculativeManager) -> Any:
    """Return the handler of `/v1/systemone`, or None if transformers has none."""
    try:
        from transformers.cli.serving.systemone import SystemOneHandler
    except ImportError:
        return None

    class Decisions(SystemOneHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            model.check_body_model(body)
            with content_errors_as_400():
                await asyncio.to_thread(self._open)
                return await super().handle_request(body, request_id)

        def _open(self) -> None:
            _, loaded, processor = self._resolve_model({})
            manager.open(loaded, processor)

    return Decisions(model, manager)
