"""What transformers' server generates with: all requests in one speculative batch."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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

from hf_spec.errors import OptionError
from hf_spec.generation.open_generation import OpenGeneration, Ready
from hf_spec.serving.scheduler import QueueFullError, Scheduler
from hf_spec.serving.settings import ServeSettings

# Where a generation config holds a strategy.
STORED = "spec_strategy"
# Inputs of a prompt that is text alone.
TEXT_INPUTS = {"input_ids", "attention_mask"}


class SpeculativeManager(GenerateManager):
    """Text in one continuous batch; prompts with more, such as images, one by one in `generate()`.

    `strategy` is a name or a config, None for the one that is stored in the model's generation
    config, or else "auto".
    """

    def __init__(self, strategy: Any, assistant: Any, settings: ServeSettings):
        # The thread of the class above is not made: one thread runs the model.
        self._strategy, self._assistant, self._settings = strategy, assistant, settings
        self._scheduler: Scheduler | None = None
        self._names = map(str, itertools.count())

    def open(self, model: PreTrainedModel, processor: Any) -> Scheduler:
        """The scheduler of a model; a model that was loaded again gets a new one.

        Raises:
            SpecError: if the model cannot be served.
        """
        if self._scheduler is None or self._scheduler.generation.model is not model:
            self.stop()
            settings = self._settings
            stored = getattr(model.generation_config, STORED, None)
            strategy = self._strategy or stored or "auto"
            generation = OpenGeneration(model, strategy, self._assistant, processor)
            # Requests start from this config, so that prompts that run alone find it there.
            setattr(model.generation_config, STORED, generation.config)
            self._scheduler = Scheduler(generation, settings.max_batch, settings.max_waiting)
        return self._scheduler

    @property
    def scheduler(self) -> Scheduler:
        """That of the model which is open."""
        assert self._scheduler is not None, "a model is opened before it is used"
        return self._scheduler

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
        scheduler = self.open(model, processor)
        if set(inputs) - TEXT_INPUTS:
            return super().generate_streaming(
                model, processor, self._alone(inputs), gen_config, request_id, response_parser
            )
        tokenizer = getattr(processor, "tokenizer", processor)
        streamer = _Streamer(tokenizer._tokenizer, loop, queue, response_parser)
        with _counted(scheduler):
            ready = self._prepare(scheduler, inputs, gen_config)
            streamer.put(inputs["input_ids"][0])
            future = scheduler.submit(ready, lambda tokens: streamer.put(torch.tensor(tokens)))
        streamer.follow(future)
        return queue, streamer

    async def generate_non_streaming(
        self,
        model: PreTrainedModel,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, Any]:
        """The whole answer: its text, the length of the prompt and the new tokens."""
        scheduler = self.open(model, processor)
        if set(inputs) - TEXT_INPUTS:
            return await super().generate_non_streaming(
                model, processor, self._alone(inputs), gen_config, request_id
            )
        with _counted(scheduler):
            ready = self._prepare(scheduler, inputs, gen_config)
            future = scheduler.submit(ready, lambda tokens: None)
        try:
            tokens = await asyncio.wrap_future(future)
        except ValueError as error:
            # Not one that a client could mend: those were found before.
            raise RuntimeError(str(error)) from error
        text = processor.decode(tokens, skip_special_tokens=True)
        return text, inputs["input_ids"].shape[-1], tokens

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run something with the model to itself."""
        return self.scheduler.run_alone(fn, *args, **kwargs)

    def async_submit(
        self, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """The same, to be awaited."""
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def stop(self) -> None:
        """Cancel what runs or waits, and end the thread."""
        if self._scheduler is not None:
            self._scheduler.stop()

    def _alone(self, inputs: Any) -> dict[str, Any]:
        """Inputs of a call of `generate()`; the strategy is in the generation config."""
        return {**inputs, "assistant": self._assistant}

    def _prepare(self, scheduler: Scheduler, inputs: Any, config: GenerationConfig) -> Ready:
        prompt = inputs["input_ids"][0].tolist()
        self._fit(scheduler.generation.model, len(prompt), config)
        return scheduler.generation.prepare(next(self._names), prompt, config)

    def _fit(self, model: PreTrainedModel, prompt_len: int, config: GenerationConfig) -> None:
        """Shorten the answer to what the context holds; refuse a prompt that fills it.

        The answer then ends with `finish_reason` "length".
        """
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limits = [limit for limit in (context, self._settings.max_length) if limit is not None]
        if not limits:
            return
        room = min(limits) - prompt_len
        if room < 1:
            raise OptionError(
                f"the prompt has {prompt_len} tokens, and with its answer it may have "
                f"{min(limits)}; shorten it"
            )
        if config.max_new_tokens is not None:
            config.max_new_tokens = min(config.max_new_tokens, room)
        elif config.max_length is not None:
            config.max_length = min(config.max_length, *limits)


class SpeculativeState(GenerationState):
    """Gives the handlers of transformers' server the one manager, whatever they ask for."""

    def __init__(self, manager: SpeculativeManager):
        super().__init__()
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        """The manager; the server is for one model."""
        return self.manager

    def is_cb_alive(self) -> bool:
        """What `/health` reports."""
        return self.manager.scheduler.is_alive

    def shutdown(self) -> None:
        """Cancel what runs or waits."""
        self.manager.stop()


class _Streamer(DirectStreamer):
    """transformers' own, for a sequence that others share their forwards with."""

    _future: Future[list[int]]

    def follow(self, future: Future[list[int]]) -> None:
        """End with the sequence."""
        self._future = future
        future.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Take the sequence out, whether it runs or waits."""
        self._future.cancel()

    def _finish(self, future: Future[list[int]]) -> None:
        if future.cancelled():
            self._enqueue(None)
        elif (error := future.exception()) is not None:
            # The handler writes it between quotation marks.
            self._enqueue(_StreamError(json.dumps(str(error))[1:-1]))
        else:
            self.end()


@contextmanager
def _counted(scheduler: Scheduler) -> Iterator[None]:
    """Count a request that is turned away before its answer begins."""
    try:
        yield
    except (QueueFullError, TypeError, ValueError):
        scheduler.count("refused")
        raise
