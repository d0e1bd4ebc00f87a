"""Continuous batching: a row whose sequence has ended takes the next prompt immediately.

The rows of a batch are slots. In every step free slots take new prompts, which run in the same
packed forward pass as the drafts of the other rows. Sequences share only forward passes: each has
the processors and stop rules that `generate()` prepares for it alone, so its output equals that of
a batch of one. An error in a processor, a stop rule or a draw ends only its own sequence. (Yu et
al. 2022, OSDI 22; named as future work by Ni et al. 2024, arXiv 2405.07542.)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_spec.backend.device.placement import execution_device, host_default
from hf_spec.common.outputs import RowStats, SpecRequestOutput, SpecStats
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import RowProcessors
from hf_spec.engine.decode.loop import speculative_step, update_counts
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.streaming import BatchStreamer
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.fast.compiled_layers import compiling
from hf_spec.engine.runner import ModelRunner


@dataclass(frozen=True)
class Request:
    """One sequence to generate: `index` counts those of the call, `number` the prompts."""

    index: int
    request_id: str
    number: int
    prompt: list[int]


@dataclass(frozen=True)
class Prepared:
    """Processors and stop rules that `generate()` prepared for one sequence as a batch of one."""

    processors: Sequence[Any]
    stop: StopRules
    do_sample: bool


class Slots(ABC):
    """Rows of a batch, each of which holds one sequence after another.

    `sample` is what `generate()` prepared for any of them; `batching` is a key of `BATCHING`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        num_slots: int,
        sample: Prepared,
        streamer: Any = None,
        batching: str = "unpadded",
    ):
        self._running: dict[int, tuple[Request, float]] = {}
        device = execution_device(model.get_input_embeddings())
        empty = torch.zeros(num_slots, 0, dtype=torch.long, device=device)
        options = {"isolated": True, "do_sample": sample.do_sample, "streamer": streamer}
        self._state = GenerationState.create(empty, empty, sample.stop, **options)
        self._state.finished = [True] * num_slots
        self._processors = RowProcessors(num_slots, self._state.fail)
        if sample.processors:
            self._state.processors = [self._processors]
        self._drafter = drafter
        self._target = ModelRunner(
            model, num_slots, drafter.hidden_layers, drafter.virtual_tokens, batching
        )
        self._verifier: Verifier | None = None
        self._created = time.perf_counter()
        self._seconds = 0.0

    @property
    def unfinished(self) -> bool:
        """True if any sequence is running or waiting."""
        return bool(self._running)

    @property
    def stats(self) -> SpecStats:
        """Statistics so far; `rows` has the order of the requests' indices."""
        return self._state.stats

    @contextmanager
    def active(self) -> Iterator[None]:
        """Prepare the models for steps, and restore them when the block ends."""
        start = time.perf_counter()
        with (
            torch.no_grad(),
            host_default(),
            compiling(self._drafter.compile),
            self._target.active(),
            self._drafter.active(self._state),
        ):
            if self._verifier is None:
                rows = self._state.num_rows
                self._verifier = self._drafter.make_verifier(self._state.processors, rows)
            yield
        self._seconds += time.perf_counter() - start
        self._state.read_clock()
        self.stats.other_seconds = (
            self._seconds - self.stats.draft_seconds - self.stats.verify_seconds
        )

    def step(self) -> list[SpecRequestOutput]:
        """Run one round, refill the rows that ended and return their sequences; while active."""
        assert self._verifier is not None, "steps run inside `active`"
        speculative_step(self._target, self._drafter, self._verifier, self._state)
        update_counts(self.stats, self._target, self._drafter)
        ended = [row for row in self._running if self._state.finished[row]]
        outputs = [self._output(row) for row in ended]
        self._refill(ended)
        if not self.unfinished:
            self._state.end_stream()
        return outputs

    @abstractmethod
    def _refill(self, free: Sequence[int]) -> None:
        """Begin waiting requests, if any, in `free` rows."""

    def _begin(self, row: int, request: Request, prepared: Prepared) -> None:
        """Begin a request in a free row."""
        # First, because it may raise: a processor may not be copyable.
        self._processors.begin(row, prepared.processors)
        self._state.begin(row, request.index, request.prompt, prepared.stop, prepared.do_sample)
        self._running[row] = request, time.perf_counter()

    def _restart(self, row: int) -> None:
        """Drop what the models store of the previous sequence; only while active."""
        self._target.restart(row)
        self._drafter.restart(row)

    def _output(self, row: int) -> SpecRequestOutput:
        """Remove a sequence from its row, complete, failed or canceled, and return it."""
        request, began = self._running.pop(row)
        error = self._state.errors.get(row)
        return SpecRequestOutput(
            request_id=request.request_id,
            prompt_ids=request.prompt,
            generated_tokens=self._state.tokens[row][len(request.prompt) :],
            created_time=self._created,
            lifespan=(began, time.perf_counter()),
            spec_stats=self.stats.rows[request.index],
            error=error,
            status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
        )


class ContinuousBatch(Slots):
    """A queue of requests and the slots that process it.

    `prepare` returns what `generate()` prepares for a request, and is called when it begins. A
    `BatchStreamer` receives the index of each request.
    """

    def __init__(  # noqa: PLR0913 - three things to run, three to run them with
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        requests: Sequence[Request],
        prepare: Callable[[Request], Prepared],
        num_slots: int,
        streamer: Any = None,
        batching: str = "unpadded",
    ):
        self.request_ids = [request.request_id for request in requests]
        self._prepare = prepare
        self._waiting = deque(requests)
        num_slots = min(num_slots, len(requests))
        # The longest prompt, so that length errors are raised before anything runs. The settings
        # are shared, so either every request has processors or none has.
        sample = prepare(max(requests, key=lambda request: len(request.prompt)))
        super().__init__(model, drafter, num_slots, sample, streamer, batching)
        for row in range(num_slots):
            self._begin_next(row)

    @property
    def unfinished(self) -> bool:
        """True if any sequence is running or waiting."""
        return bool(self._waiting or self._running)

    def _refill(self, free: Sequence[int]) -> None:
        for row in free[: len(self._waiting)]:
            self._begin_next(row)
            self._restart(row)

    def _begin_next(self, row: int) -> None:
        request = self._waiting.popleft()
        self._begin(row, request, self._prepare(request))


def iterate_finished(batch: ContinuousBatch) -> Iterator[SpecRequestOutput]:
    """Yield every sequence as soon as it ends, with the models restored before each `yield`."""
    while batch.unfinished:
        ended: list[SpecRequestOutput] = []
        with batch.active():
            while not ended:
                ended = batch.step()
        yield from ended


class OpenBatch(Slots):
    """Slots that the caller fills while the batch runs, as a server needs it.

    Requests are added before the first `active`, then between two steps of it. Every request has
    its own settings, and some draw while others do not. Drafts are those of greedy decoding, so
    they depend on no draws and one exact rule (`NodeDraw`) verifies them all.

    `on_tokens` receives the id of a request and its newest tokens. `stats.rows` has one entry per
    slot, of the request that it holds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        num_slots: int,
        on_tokens: Callable[[str, list[int]], None],
        batching: str = "unpadded",
    ):
        def stream(row: int, tokens: list[int]) -> None:
            on_tokens(running[row][0].request_id, tokens)

        # No stop rule holds for all requests. The placeholder in the list of processors reserves
        # the processors that any request may have.
        sample = Prepared([None], StopRules([], 1), do_sample=False)
        super().__init__(model, drafter, num_slots, sample, BatchStreamer(stream), batching)
        # Not `self`: a reference cycle would keep the KV cache until Python's collector runs.
        running = self._running

    @property
    def running(self) -> list[str]:
        """Ids of the requests that have a slot."""
        return [request.request_id for request, _ in self._running.values()]

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return self._state.num_rows - len(self._running)

    def add(self, request: Request, prepared: Prepared) -> None:
        """Begin a request in a free slot, whose index it takes."""
        row = next(row for row in range(self._state.num_rows) if row not in self._running)
        self._begin(row, replace(request, index=row), prepared)
        if self._verifier is not None:
            self._restart(row)

    def cancel(self, request_id: str) -> SpecRequestOutput | None:
        """Remove a request and return its tokens so far; None if it is not running."""
        for row, (request, _) in self._running.items():
            if request.request_id == request_id:
                self._state.finished[row] = True
                return self._output(row)
        return None

    def _refill(self, free: Sequence[int]) -> None:
        """Leave the rows free for `add`."""

    def _output(self, row: int) -> SpecRequestOutput:
        output = super()._output(row)
        self.stats.rows[row] = RowStats()
        # Verification is faster while no row has processors.
        self._processors.begin(row, [])
        return output
