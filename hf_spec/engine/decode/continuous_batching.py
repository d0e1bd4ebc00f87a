"""Continuous batching: a row whose sequence has ended takes the next prompt at once.

The rows of a batch are slots. In every step the slots that are free take prompts from the queue;
a newcomer's prompt runs in the same packed forward as the drafts of the others. Sequences share
nothing but forwards: each has the processors and the stop rules that `generate()` prepares for it
alone, so each comes out as it would from a batch of one. An error in a processor, a stop rule or a
draw ends the sequence that it belongs to; the others go on. (Yu et al. 2022, OSDI 22; named as
future work by Ni et al. 2024, arXiv 2405.07542.)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_spec.backend.device.placement import execution_device
from hf_spec.common.outputs import SpecRequestOutput, SpecStats
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import RowProcessors
from hf_spec.engine.decode.loop import count_models, speculative_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.fast.compiled_layers import compiling
from hf_spec.engine.forward.runner import ModelRunner


@dataclass(frozen=True)
class Request:
    """One sequence to generate: number `index` of the call, from prompt `number`."""

    index: int
    request_id: str
    number: int
    prompt: list[int]


@dataclass(frozen=True)
class Prepared:
    """What `generate()` prepared for one sequence; the stop rules are for a batch of one."""

    processors: Sequence[Any]
    stop: StopRules
    do_sample: bool


class Slots(ABC):
    """The rows of a batch, which hold one sequence after another.

    `sample` stands for what is prepared for any of them; subclasses say who comes next.
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
        self._state = GenerationState.create(
            empty,
            empty,
            sample.stop,
            isolated=True,
            do_sample=sample.do_sample,
            streamer=streamer,
        )
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
        """Whether there is anything left to do."""
        return bool(self._running)

    @property
    def stats(self) -> SpecStats:
        """Counts so far; `rows` by the index of the request."""
        return self._state.stats

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the models ready for steps; they are as they were found when the block ends."""
        start = time.perf_counter()
        with (
            torch.no_grad(),
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
        """Advance all rows by one round, while active; rows that end take who comes next.

        Returns:
            The sequences that ended with it.
        """
        assert self._verifier is not None, "steps are taken inside `active`"
        speculative_step(self._target, self._drafter, self._verifier, self._state)
        count_models(self.stats, self._target, self._drafter)
        ended = [row for row in self._running if self._state.finished[row]]
        outputs = [self._output(row) for row in ended]
        self._refill(ended)
        if not self.unfinished:
            self._state.feed.end()
        return outputs

    @abstractmethod
    def _refill(self, free: Sequence[int]) -> None:
        """Give rows that have become free to requests that wait, if any do."""

    def _begin(self, row: int, request: Request, prepared: Prepared) -> None:
        """Give a free row a request."""
        # First what may raise: a processor that cannot be copied.
        self._processors.begin(row, prepared.processors)
        self._state.begin(row, request.index, request.prompt, prepared.stop, prepared.do_sample)
        self._running[row] = request, time.perf_counter()

    def _restart(self, row: int) -> None:
        """Let the models forget what they kept of the sequence before; while active."""
        self._target.restart(row)
        self._drafter.restart(row)

    def _output(self, row: int) -> SpecRequestOutput:
        """Remove a sequence from its row, complete or not; `error` is the reason if it failed."""
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
    """A queue of requests and the slots that work it off.

    `prepare` asks `generate()` what a request needs, when it begins; a `BatchStreamer` knows the
    sequences by their index. `request_ids` are in the order of the requests.
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
        # Whatever is refused for its length is refused here, before anything runs. The same
        # settings make processors for every request or for none.
        sample = prepare(max(requests, key=lambda request: len(request.prompt)))
        super().__init__(model, drafter, num_slots, sample, streamer, batching)
        for row in range(num_slots):
            self._begin_next(row)

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._waiting or self._running)

    def _refill(self, free: Sequence[int]) -> None:
        for row in free[: len(self._waiting)]:
            self._begin_next(row)
            self._restart(row)

    def _begin_next(self, row: int) -> None:
        request = self._waiting.popleft()
        self._begin(row, request, self._prepare(request))


def as_they_finish(batch: ContinuousBatch) -> Iterator[SpecRequestOutput]:
    """Every sequence as soon as it ends; between two of them the models are as they were found."""
    while batch.unfinished:
        ended: list[SpecRequestOutput] = []
        with batch.active():
            while not ended:
                ended = batch.step()
        yield from ended
