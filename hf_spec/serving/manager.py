"""Generation for the handlers of transformers' server: all requests in one speculative batch."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
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
from hf_spec.serving.errors import RequestError, StoppedError
from hf_spec.serving.scheduler import Scheduler
from hf_spec.serving.settings import ServeSettings

# Where a generation config holds a strategy.
STORED = "spec_strategy"
# Inputs of a prompt that is text alone.
TEXT_INPUTS = {"input_ids", "attention_mask"}


class SpeculativeManager:
    """The scheduler of the served model, and what its requests share.

    `strategy` is a name or a config, None for the one that is stored in the model's generation
    config, or else "auto".
    """

    def __init__(self, strategy: Any, assistant: Any, settings: ServeSettings):
        self._strategy, self.assistant, self.settings = strategy, assistant, settings
        self._scheduler: Scheduler | None = None
        self._stopped = False
        # Several requests may find a model that is not open.
        self._opening = threading.Lock()
        self.names = map(str, itertools.count())

    def open(self, model: PreTrainedModel, processor: Any) -> Scheduler:
        """Return the scheduler of a model; a model that was loaded again gets a new one.

        Raises:
            SpecError: if the model cannot be served.
            StoppedError: if the manager has been stopped.
        """
        with self._opening:
            if self._stopped:
                raise StoppedError()
            if self._scheduler is None or self._scheduler.generation.model is not model:
                self._end(2.0)
                stored = getattr(model.generation_config, STORED, None)
                strategy = self._strategy or stored or "auto"
                generation = OpenGeneration(model, strategy, self.assistant, processor)
                # Requests start from this config, so that prompts that run alone find it there.
                setattr(model.generation_config, STORED, generation.config)
                settings = self.settings
                self._scheduler = Scheduler(generation, settings.max_batch, settings.max_waiting)
            return self._scheduler

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the model that is open, if one is."""
        return self._scheduler

    @property
    def is_alive(self) -> bool:
        """True while requests are answered; a model that is not open is opened by the next one."""
        return not self._stopped and (self._scheduler is None or self._scheduler.is_alive)

    def close(self) -> None:
        """Fail what runs or waits, and forget the model."""
        with self._opening:
            self._end(2.0)

    def stop(self, timeout: float = 2.0) -> None:
        """Fail what runs or waits, and all requests that come later."""
        self._stopped = True
        self._end(timeout, forget=False)

    def _end(self, timeout: float, forget: bool = True) -> None:
        if self._scheduler is not None:
            self._scheduler.stop(timeout)
            # Its counts are still read when a server has stopped.
            self._scheduler = None if forget else self._scheduler


class RequestGeneration(GenerateManager):
    """Generates the answer of one request: text in the batch, prompts with images alone.

    `prepare` comes first and may take long, so it is called outside the event loop.
    """

    def __init__(self, manager: SpeculativeManager):
        # The thread of the class above is not made: one thread runs the model.
        self._manager = manager
        self._scheduler: Scheduler | None = None
        self._ready: Ready | None = None

    def prepare(
        self, model: PreTrainedModel, processor: Any, inputs: Any, config: GenerationConfig
    ) -> None:
        """Check a request and prepare its processors and stop rules.

        Raises:
            SpecError: if a setting is wrong, or cannot be served.
            ValueError: `generate()`'s errors about its settings.
        """
        manager = self._manager
        self._scheduler = manager.open(model, processor)
        with _counted(self._scheduler):
            check_config(config, model, manager.settings)
            prompt = inputs["input_ids"][0].tolist()
            fit_to_context(config, model, len(prompt), manager.settings)
            if not set(inputs) - TEXT_INPUTS:
                generation = self._scheduler.generation
                self._ready = generation.prepare(next(manager.names), prompt, config)

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], DirectStreamer]:
        """Start an answer; its pieces come through the queue."""
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
        self,
        model: PreTrainedModel,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, Any]:
        """Return the whole answer: its text, the length of the prompt and the new tokens."""
        prompt_len = inputs["input_ids"].shape[-1]
        if self._ready is None:
            watch = _Watch()
            future = self._run_alone(model, processor, inputs, gen_config, watch)
            watch.future = future
        else:
            future = self._submit(lambda tokens: None)
        try:
            tokens = await asyncio.wrap_future(future)
        except ValueError as error:
            # Not one that a client could mend: those were found before.
            raise RuntimeError(str(error)) from error
        if self._ready is None:
            tokens = tokens[0, prompt_len:]
        return processor.decode(tokens, skip_special_tokens=True), prompt_len, tokens

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run something with the model to itself."""
        scheduler = self._scheduler or self._manager.scheduler
        assert scheduler is not None, "the model is opened before it is used"
        with _counted(scheduler):
            return scheduler.run_alone(fn, *args, **kwargs)

    def async_submit(
        self, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """The same, to be awaited."""
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def stop(self) -> None:
        """Do nothing: the manager ends what all requests share."""

    def _submit(self, on_tokens: Callable[[list[int]], None]) -> Future[list[int]]:
        assert self._scheduler is not None, "prepared before"
        assert self._ready is not None, "prepared before"
        with _counted(self._scheduler):
            return self._scheduler.submit(self._ready, on_tokens)

    def _run_alone(
        self, model: Any, processor: Any, inputs: Any, config: GenerationConfig, streamer: Any
    ) -> Future[Any]:
        """Queue a call of `generate()`; the strategy is in the generation config."""
        given = {**inputs, "generation_config": config, "tokenizer": processor}
        if hasattr(model, "has_talker"):
            # The answer is text.
            given["generation_mode"] = "text"
        assistant = self._manager.assistant
        return self.submit(model.generate, **given, assistant=assistant, streamer=streamer)


class SpeculativeState(GenerationState):
    """Gives the handlers of transformers' server the generation of one request."""

    def __init__(self, manager: SpeculativeManager):
        super().__init__()
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        """Return what generates one answer; called once per request."""
        return RequestGeneration(self.manager)

    def is_cb_alive(self) -> bool:
        """What `/health` reports."""
        return self.manager.is_alive

    def shutdown(self) -> None:
        """End what runs or waits."""
        self.manager.stop()


class _Streamer(DirectStreamer):
    """transformers' own, for a sequence that others share their forwards with."""

    _future: Future[Any] | None = None
    _ended = False

    def follow(self, future: Future[Any]) -> None:
        """End with the sequence."""
        self._future = future
        future.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Take the sequence out, whether it runs or waits."""
        if self._future is not None:
            self._future.cancel()
        super().cancel()

    def end(self) -> None:
        """End a complete answer; `generate()` does this by itself, a batch does not."""
        if not self._ended:
            self._ended = True
            super().end()

    def _finish(self, future: Future[Any]) -> None:
        # The event loop is closed: there are no listeners any more.
        with suppress(RuntimeError):
            if future.cancelled():
                self._enqueue(_StreamError("the request was canceled"))
            elif (error := future.exception()) is not None:
                # The handler writes it between quotation marks.
                self._enqueue(_StreamError(json.dumps(str(error))[1:-1]))
            else:
                self.end()


class _Watch(BaseStreamer):
    """Criterion that ends a call of `generate()` once its client has left."""

    future: Future[Any] | None = None

    def put(self, value: torch.Tensor) -> None:
        if self.future is not None and self.future.done():
            raise StoppedError()

    def end(self) -> None:
        """Do nothing: there is nothing left to watch."""


@contextmanager
def _counted(scheduler: Scheduler) -> Iterator[None]:
    """Count a request that is rejected before its answer begins."""
    try:
        yield
    except (RequestError, TypeError, ValueError):
        scheduler.count("refused")
        raise
