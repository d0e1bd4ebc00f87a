"""Scheduler with one thread per model; requests join its batch in order of arrival.

A request is a `Future`. Cancelling it removes the sequence before the next step. An error raised by
the settings of one sequence ends only this sequence. The batch and its memory exist as long as
sequences run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hf_spec.common.errors import SpecError
from hf_spec.common.outputs import SpecRequestOutput, SpecStats
from hf_spec.engine.decode.continuous_batching import OpenBatch
from hf_spec.generation.open_generation import OpenGeneration, Ready
from hf_spec.serving.errors import RequestError, StoppedError
from hf_spec.serving.metrics import Counts


@dataclass(frozen=True)
class _Sequence:
    """Text request; `future` returns the generated tokens."""

    ready: Ready
    on_tokens: Callable[[list[int]], None]
    future: Future[list[int]] = field(default_factory=Future)


@dataclass(frozen=True)
class _Call:
    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.done():
            try:
                _set_outcome(self.future, self.work())
            except Exception as error:  # noqa: BLE001 - raised by `future.result()`
                _set_outcome(self.future, error=error)


def _set_outcome(future: Future[Any], result: Any = None, error: Exception | None = None) -> bool:
    """Set result or error; return False if the future is already done."""
    # Futures are never marked as running, so they can be cancelled at any time.
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


class Scheduler:
    """Queue and batch of the requests of one model, at most `max_batch` at a time.

    Methods are thread-safe. Callbacks run in the scheduler's thread.
    """

    def __init__(self, generation: OpenGeneration, max_batch: int, max_waiting: int):
        self.generation = generation
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._waiting: deque[_Sequence | _Call] = deque()
        self._running: dict[str, _Sequence] = {}
        self._call: _Call | None = None
        self._outcomes: Counter[str] = Counter()
        # Totals of finished batches and sequences; the same including the running batch.
        self._finished = self._published = Counts()
        self._stopping = False
        # Guards the queue, the outcomes and `_stopping`.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="hf-spec-serve", daemon=True)
        self._thread.start()

    def submit(self, ready: Ready, on_tokens: Callable[[list[int]], None]) -> Future[list[int]]:
        """Queue a request; `on_tokens` is called with its new tokens as soon as they are final.

        Raises `RequestError` if `max_waiting` requests wait, and `StoppedError` after `stop`.
        """
        return self._enqueue(_Sequence(ready, on_tokens))

    def run_alone(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call that needs the model exclusively; raises the errors of `submit`."""
        return self._enqueue(_Call(partial(work, *args, **kwargs)))

    def count(self, outcome: str) -> None:
        """Count the outcome of a request."""
        with self._changed:
            self._outcomes[outcome] += 1

    @property
    def counts(self) -> Counts:
        """Totals up to the latest step, and the current load."""
        with self._changed:
            return replace(
                self._published,
                outcomes=self._outcomes.copy(),
                queue_length=self._num_waiting(),
                running=len(self._running),
            )

    @property
    def is_alive(self) -> bool:
        """True while requests are processed."""
        return self._thread.is_alive()

    def stop(self, timeout: float = 2.0) -> None:
        """Fail all requests with `StoppedError`; wait `timeout` seconds for the current step."""
        with self._changed:
            self._stopping = True
            pending = [*self._waiting, *self._running.values()]
            pending += [self._call] if self._call is not None else []
            self._waiting.clear()
            self._changed.notify()
        for item in pending:
            if _set_outcome(item.future, error=StoppedError()):
                self.count("failed")
        self._thread.join(timeout)

    def _enqueue(self, item: Any) -> Future[Any]:
        with self._changed:
            if self._stopping:
                self._outcomes["refused"] += 1
                raise StoppedError()
            if (number := self._num_waiting()) >= self._max_waiting:
                self._outcomes["refused"] += 1
                raise RequestError(
                    429,
                    f"{number} requests wait already; try again later",
                    headers={"Retry-After": "1"},
                )
            self._waiting.append(item)
            self._changed.notify()
        return item.future

    def _num_waiting(self) -> int:
        return sum(not item.future.cancelled() for item in self._waiting)

    def _work(self) -> None:
        while (item := self._next_item()) is not None:
            if isinstance(item, _Call):
                item.run()
                self._call = None
            else:
                self._run_batch()
        self._running.clear()

    def _next_item(self) -> _Sequence | _Call | None:
        """Wait for the head of the queue; only calls are removed. Return None after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            first = self._waiting[0]
            if isinstance(first, _Call):
                self._waiting.popleft()
                self._call = first
            return first

    def _run_batch(self) -> None:
        """Run sequences until none is left; a queued call ends the batch after those before it."""
        try:
            began = time.perf_counter()
            batch = self.generation.make_batch(self._max_batch, self._forward_tokens)
            unfinished = self._update(batch)
            with batch.active():
                while unfinished:
                    for output in batch.step():
                        self._finish(output)
                    self._publish(batch.stats, began)
                    unfinished = self._update(batch)
            self._finished = self._publish(batch.stats, began)
        except Exception as error:  # noqa: BLE001 - later requests can still be processed
            self._fail(error)

    def _update(self, batch: OpenBatch) -> bool:
        """Remove cancelled sequences and add waiting ones; return False if none is left."""
        for name in batch.running:
            if self._running[name].future.done():
                output = batch.cancel(name)
                assert output is not None
                self._finish(output)
        for sequence in self._dequeue(batch.num_free):
            request = sequence.ready.request
            try:
                batch.add(request, sequence.ready.prepared)
            except SpecError as error:
                # For example a processor that cannot be copied.
                with self._changed:
                    del self._running[request.request_id]
                self._resolve(sequence, error=error)
            else:
                prompt_tokens = self._finished.prompt_tokens + len(request.prompt)
                self._finished = replace(self._finished, prompt_tokens=prompt_tokens)
        return batch.unfinished and not self._stopping

    def _dequeue(self, limit: int) -> list[_Sequence]:
        """Remove at most `limit` sequences from the head of the queue, up to the first call."""
        sequences: list[_Sequence] = []
        with self._changed:
            while self._waiting and len(sequences) < limit:
                first = self._waiting[0]
                if isinstance(first, _Call):
                    break
                self._waiting.popleft()
                if first.future.cancelled():
                    self._outcomes["cancelled"] += 1
                    continue
                sequences.append(first)
                self._running[first.ready.request.request_id] = first
        return sequences

    def _forward_tokens(self, name: str, tokens: list[int]) -> None:
        sequence = self._running[name]
        if sequence.future.done():
            # Cancelled, or its callback failed: `_update` removes it.
            return
        try:
            sequence.on_tokens(tokens)
        except Exception as error:  # noqa: BLE001 - other sequences are not affected
            if not sequence.future.cancelled():
                self._resolve(sequence, error=error)

    def _finish(self, output: SpecRequestOutput) -> None:
        """Resolve and count a sequence that has left the batch."""
        sequence = self._running[output.request_id]
        with self._changed:
            del self._running[output.request_id]
        assert output.spec_stats is not None
        self._finished = self._finished.plus(SpecStats([output.spec_stats]))
        if output.error is not None:
            message = f"the response cannot be generated with these settings: {output.error}"
            self._resolve(sequence, error=RequestError(422, message))
        else:
            self._resolve(sequence, output.generated_tokens)

    def _fail(self, error: Exception) -> None:
        """Fail all running sequences, or the next one if none runs, to avoid endless retries."""
        with self._changed:
            failed = [*self._running.values()]
            self._running.clear()
            if not failed and self._waiting:
                first = self._waiting.popleft()
                assert isinstance(first, _Sequence)
                failed = [first]
        self._finished = self._published
        for sequence in failed:
            self._resolve(sequence, error=error)

    def _resolve(
        self, sequence: _Sequence, tokens: list[int] | None = None, error: Exception | None = None
    ) -> None:
        """Resolve the future of a sequence if it is not done, and count the outcome."""
        if _set_outcome(sequence.future, tokens, error):
            self.count("answered" if error is None else "failed")
        elif sequence.future.cancelled():
            self.count("cancelled")

    def _publish(self, stats: SpecStats, began: float) -> Counts:
        """Publish and return the totals including a running batch that started at `began`."""
        busy = self._finished.busy_seconds + time.perf_counter() - began
        self._published = replace(self._finished.plus(stats), busy_seconds=busy)
        return self._published
