"""transformers' handlers of text, which read requests outside the event loop; and the one model.

A handler renders the chat template, tokenizes and builds the generation config before it first
waits for anything. That part runs in a thread here, so a request that takes long to read delays no
other. It ends with a function that starts the answer, which the event loop calls.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from hf_spec.serving.manager import SpeculativeManager, SpeculativeState

# Requests that are read at a time; more wait for a thread. Each takes the interpreter from the
# event loop for 5 ms at a time, so more of them would delay streams and `/health`.
READERS = 2

# What wrong contents of a body raise in handlers, templates and tokenizers. Without a translation
# each would be a status 500, which clients take for a reason to try again.
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
def reading() -> Iterator[None]:
    """Turn errors about the contents of a request into `RequestError` with status 400."""
    try:
        yield
    except (*CLIENT_ERRORS, RuntimeError) as error:
        # torch raises it about values that make no tensor. Its subclasses are about the device.
        if not isinstance(error, CLIENT_ERRORS) and type(error) is not RuntimeError:
            raise
        # The message of a missing key is its name alone.
        plain = isinstance(error, (ValueError, TemplateError))
        message = str(error) if plain else f"{type(error).__name__}: {error}"
        raise RequestError(400, message) from error


class ServedModel(ModelManager):
    """The one model of a server; other names are answered with status 404."""

    def __init__(self, name: str, **options: Any):
        self.name = name
        repository, self._gguf_file = split_model_id(name)
        self._key = self.process_model_name(repository)
        super().__init__(force_model=name, **options)

    def check(self, requested: object) -> None:
        """Reject a name that is not the served model's.

        Raises:
            RequestError: with status 404.
        """
        if requested != self.name:
            raise self._missing(requested)

    def _missing(self, requested: object) -> RequestError:
        return RequestError(
            404,
            f"the model {requested!r:.200} does not exist; this server has {self.name!r}",
            param="model",
            code="model_not_found",
        )

    def name_in(self, body: dict[str, Any]) -> None:
        """Check the name in a body, and add it where there is none; errors are those of `check`."""
        if body.get("model") is None:
            body["model"] = self.name
        self.check(body["model"])

    def load_model_and_processor(
        self, model_id_and_revision: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Load the model, or return it if it is loaded; every endpoint comes by here."""
        if (model_id_and_revision, kwargs.get("gguf_file")) != (self._key, self._gguf_file):
            raise self._missing(model_id_and_revision)
        return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)

    @property
    def description(self) -> dict[str, Any]:
        """The entry of the model in `/v1/models`."""
        owner, slash, _ = self.name.strip("/").partition("/")
        owned_by = owner if slash and not self.name.startswith(("/", ".")) else "local"
        return {"id": self.name, "object": "model", "created": 0, "owned_by": owned_by}


class _OffLoop:
    """Mixin of a handler: `handle_request` up to the answer runs in a thread."""

    model_manager: ServedModel
    generation_state: SpeculativeState
    readers: ThreadPoolExecutor

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Read a request, then start its answer."""
        loop = asyncio.get_running_loop()
        start = await loop.run_in_executor(self.readers, self._read, body, request_id)
        answer = start()
        return await answer if inspect.isawaitable(answer) else answer

    def _read(self, body: dict[str, Any], request_id: str) -> Callable[[], Any]:
        """Return what starts the answer; in a thread."""
        with reading():
            self.model_manager.name_in(body)
            check_body(body, self.generation_state.manager.settings)
            # It waits for nothing that needs the event loop of the server.
            return asyncio.run(super().handle_request(body, request_id))  # type: ignore[misc]

    def _streaming(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        return self._prepared(super()._streaming, args, kwargs)  # type: ignore[misc]

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> Callable[[], Awaitable[Any]]:
        return self._prepared(super()._non_streaming, args, kwargs)  # type: ignore[misc]

    @staticmethod
    def _prepared(
        answer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        # Handlers differ in the order of the arguments, and releases in further ones.
        given = inspect.signature(answer).bind(*args, **kwargs).arguments
        given["gen_manager"].prepare(
            *(given[name] for name in ("model", "processor", "inputs", "gen_config"))
        )
        return partial(answer, *args, **kwargs)


class _Chat(_OffLoop, ChatCompletionHandler):  # type: ignore[misc]
    pass


class _Completions(_OffLoop, CompletionHandler):  # type: ignore[misc]
    pass


class _Responses(_OffLoop, ResponseHandler):  # type: ignore[misc]
    pass


class _Transcriptions(TranscriptionHandler):
    """Names what is wrong with a form; the models that are served here take no audio files."""

    async def handle_request(self, request: Any) -> Any:
        with reading():
            return await super().handle_request(request)

    @staticmethod
    def _prepare_audio_inputs(file_bytes: bytes, audio_processor: Any, audio_model: Any) -> Any:
        raise HTTPException(
            400,
            f"{type(audio_model).__name__} does not transcribe; `transformers serve` serves "
            "speech models",
        )


class Handlers:
    """The handlers of the endpoints, which share the model and the threads that read requests."""

    def __init__(self, model: ServedModel, manager: SpeculativeManager):
        state = SpeculativeState(manager)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="hf-spec-read")
        self.chat, self.completions, self.responses = (
            kind(model, state) for kind in (_Chat, _Completions, _Responses)
        )
        for handler in (self.chat, self.completions, self.responses):
            handler.readers = self._readers
        self.transcriptions = _Transcriptions(model, state)
        self.decisions = _decisions(model, state)

    def close(self) -> None:
        """Start to read no more requests."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def _decisions(model: ServedModel, state: SpeculativeState) -> Any:
    """Return the handler of `/v1/systemone`, or None where transformers has none."""
    try:
        from transformers.cli.serving.systemone import SystemOneHandler
    except ImportError:
        return None

    class Decisions(SystemOneHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            model.name_in(body)
            with reading():
                await asyncio.to_thread(self._open)
                return await super().handle_request(body, request_id)

        def _open(self) -> None:
            """Make sure that the model is loaded and open."""
            _, loaded, processor = self._resolve_model({})
            state.manager.open(loaded, processor)

    return Decisions(model, state)
