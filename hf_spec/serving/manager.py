"""Generation manager for transformers' handlers: all requests in one speculative batch."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _StreamError,
)
from transformers.generation.streamers import BaseStreamer

from hf_spec.generation.open_generation import OpenGeneration, Ready
from hf_spec.serving.checks import check_config, fit_to_context
from hf_spec.serving.errors import StoppedError
from hf_spec.serving.scheduler import Scheduler
from hf_spec.serving.settings import ServeSettings

# Threads that parse requests. Each holds the interpreter lock for 5 ms at a time, so more threads
# would delay streams and `/health`.
READERS = 2
# Inputs of a text-only prompt.
TEXT_INPUTS = {"input_ids", "attention_mask"}


class SpeculativeManager(GenerationState):
    """Scheduler of the served model and shared state of its requests.

    `strategy` is a name or a config. None selects the strategy stored in the model's generation
    config, or "auto" without one.
    """

    def __init__(self, strategy: Any, assistant: Any, settings: ServeSettings):
        super().__init__()
        self._strategy, self.assistant, self.settings = strategy, assistant, settings
        self.scheduler: Scheduler | None = None
        self._stopped = False
        # Concurrent requests may try to open the model.
        self._open_lock = threading.Lock()
        self.names = map(str, itertools.count())
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="hf-spec-read")

    def open(self, model: PreTrainedModel, processor: Any) -> Scheduler:
        """Return the scheduler of a model; a reloaded model gets a new one.

        Raises `SpecError` if the model is unsupported, and `StoppedError` after `stop`.
        """
        with self._open_lock:
            if self._stopped:
                raise StoppedError()
            if self.scheduler is None or self.scheduler.generation.model is not model:
                self._release()
                config: Any = model.generation_config
                strategy = self._strategy or getattr(config, "spec_strategy", None) or "auto"
                generation = OpenGeneration(model, strategy, self.assistant, processor)
                # Requests start from this config; prompts that run alone read the strategy from it.
                config.spec_strategy = generation.config
                settings = self.settings
                self.scheduler = Scheduler(generation, settings.max_batch, settings.max_waiting)
            return self.scheduler

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        """Return the manager of one response; handlers call this once per request."""
        return RequestGeneration(self)

    @property
    def is_alive(self) -> bool:
        """True while requests are processed; the next request opens a model that is not open."""
        return not self._stopped and (self.scheduler is None or self.scheduler.is_alive)

    def close(self) -> None:
        """Fail running and waiting requests, and release the model."""
        with self._open_lock:
            self._release()

    def stop(self, timeout: float = 2.0) -> None:
        """Fail running, waiting and all later requests; the counters can still be read."""
        self._stopped = True
        if self.scheduler is not None:
            self.scheduler.stop(timeout)

    def _release(self) -> None:
        if self.scheduler is not None:
            self.scheduler.stop()
            self.scheduler = None


class RequestGeneration(GenerateManager):
    """Generation of one response: text in the batch, prompts with images alone.

    `prepare` is called first, outside the event loop, because it can be slow.
    """

    def __init__(self, manager: SpeculativeManager):
        # The base class would start a thread; here the scheduler's thread runs the model.
        self._manager = manager
        self._scheduler: Scheduler | None = None
        self._ready: Ready | None = None

    def prepare(self, model: Any, processor: Any, inputs: Any, config: GenerationConfig) -> None:
        """Check a request and prepare its processors and stop rules.

        Raises `SpecError` for an invalid or unsupported setting, and `ValueError` for one that
        `generate()` rejects.
        """
        manager = self._manager
        self._scheduler = manager.open(model, processor)
        try:
            check_config(config, model, manager.settings)
            prompt = inputs["input_ids"][0].tolist()
            fit_to_context(config, model, len(prompt), manager.settings)
            if not set(inputs) - TEXT_INPUTS:
                generation = self._scheduler.generation
                self._ready = generation.prepare(next(manager.names), prompt, config)
        except (TypeError, ValueError):
            self._scheduler.count("refused")
            raise

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], DirectStreamer]:
        """Start a response, streamed through the queue."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        tokenizer = getattr(processor, "tokenizer", processor)
        streamer = _Streamer(tokenizer._tokenizer, loop, queue, response_parser)
        if self._ready is None:
            streamer.follow(self._run_alone(model, processor, inputs, gen_config, streamer))
        else:
            streamer.put(inputs["input_ids"][0])
            streamer.follow(self._submit(lambda tokens: streamer.put(torch.tensor(tokens))))
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        """Return the whole response: text, prompt length and new tokens."""
        prompt_len = inputs["input_ids"].shape[-1]
        if self._ready is None:
            stopper = _StopWhenCancelled()
            future = self._run_alone(model, processor, inputs, gen_config, stopper)
            stopper.future = future
        else:
            future = self._submit(lambda tokens: None)
        try:
            tokens = await asyncio.wrap_future(future)
        except ValueError as error:
            # The client cannot fix it: its errors were found before.
            raise RuntimeError(str(error)) from error
        if self._ready is None:
            tokens = tokens[0, prompt_len:]
        return processor.decode(tokens, skip_special_tokens=True), prompt_len, tokens

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function that needs the model exclusively."""
        scheduler = self._scheduler or self._manager.scheduler
        assert scheduler is not None, "the model is opened before it is used"
        return scheduler.run_alone(fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like `submit`, as an awaitable."""
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def stop(self) -> None:
        """Do nothing: the manager stops the shared scheduler."""

    def _submit(self, on_tokens: Callable[[list[int]], None]) -> Future[list[int]]:
        assert self._scheduler is not None, "prepared before"
        assert self._ready is not None, "prepared before"
        return self._scheduler.submit(self._ready, on_tokens)

    def _run_alone(
        self, model: Any, processor: Any, inputs: Any, config: GenerationConfig, streamer: Any
    ) -> Future[Any]:
        """Queue a call of `generate()`; the strategy is in the generation config."""
        arguments = {**inputs, "generation_config": config, "tokenizer": processor}
        if hasattr(model, "has_talker"):
            # No speech output.
            arguments["generation_mode"] = "text"
        assistant = self._manager.assistant
        return self.submit(model.generate, **arguments, assistant=assistant, streamer=streamer)


class _Streamer(DirectStreamer):
    """Streamer of transformers' server for a sequence of the batch."""

    _future: Future[Any] | None = None
    _ended = False

    def follow(self, future: Future[Any]) -> None:
        self._future = future
        future.add_done_callback(self._finish)

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()
        super().cancel()

    def end(self) -> None:
        """End the stream once; `generate()` calls this, the batch does not."""
        if not self._ended:
            self._ended = True
            super().end()

    def _finish(self, future: Future[Any]) -> None:
        # RuntimeError: the event loop is closed, so there are no listeners.
        with suppress(RuntimeError):
            if future.cancelled():
                self._enqueue(_StreamError("the request was canceled"))
            elif (error := future.exception()) is not None:
                # The handler puts the text between quotation marks.
                self._enqueue(_StreamError(json.dumps(str(error))[1:-1]))
            else:
                self.end()


class _StopWhenCancelled(BaseStreamer):
    future: Future[Any] | None = None

    def put(self, value: torch.Tensor) -> None:
        if self.future is not None and self.future.done():
            raise StoppedError()

    def end(self) -> None:
        pass
