"""One thread that runs one model: requests join its batch in the order in which they came.

A request is a `Future`: cancelling it takes the sequence out before the next step, wherever it is.
A sequence whose own settings raise an error gets that error; the others go on.
The batch lives as long as anything runs, and its memory with it.
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
from hf_spec.serving.counts import Counts, Load
from hf_spec.serving.errors import QueueFullError, SequenceError, StoppedError


@dataclass(frozen=True)
class _Sequence:
    """A request for text; `future` has the generated tokens at the end."""

    ready: Ready
    on_tokens: Callable[[list[int]], None]
    future: Future[list[int]] = field(default_factory=Future)


@dataclass(frozen=True)
class _Call:
    """Work with the model that has to run alone."""

    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if self.future.done():
            return
        try:
            _resolve(self.future, self.work())
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the result
            _resolve(self.future, error=error)


def _resolve(future: Future[Any], result: Any = None, error: Exception | None = None) -> bool:
    """Set the outcome; False if the future was cancelled or has one."""
    # Futures are never marked as running, so that cancelling works at any time.
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


class Scheduler:
    """Answers requests with one model, at most `max_batch` at a time.

    Its methods may be called from any thread; what they are given is called in its own.
    """

    def __init__(self, generation: OpenGeneration, max_batch: int, max_waiting: int):
        self.generation = generation
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._waiting: deque[_Sequence | _Call] = deque()
        self._running: dict[str, _Sequence] = {}
        self._call: _Call | None = None
        self._outcomes: Counter[str] = Counter()
        # Of batches and sequences that have ended; and the same with what runs now.
        self._ended = self._seen = Counts()
        self._stopping = False
        # Guards what several threads change: the queue, the outcomes and the wish to stop.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="hf-spec-serve", daemon=True)
        self._thread.start()

    def submit(self, ready: Ready, on_tokens: Callable[[list[int]], None]) -> Future[list[int]]:
        """Queue a request; `on_tokens` gets its newest tokens as soon as they are certain.

        Raises:
            QueueFullError: if too many wait.
            StoppedError: if the scheduler has been stopped.
        """
        return self._queue(_Sequence(ready, on_tokens))

    def run_alone(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call that has the model to itself; errors are those of `submit`."""
        return self._queue(_Call(partial(work, *args, **kwargs)))

    def count(self, outcome: str) -> None:
        """Count a request that ended before it was queued."""
        with self._changed:
            self._outcomes[outcome] += 1

    @property
    def counts(self) -> Counts:
        """What has been done, up to the newest step."""
        with self._changed:
            return replace(self._seen, outcomes=self._outcomes.copy())

    @property
    def load(self) -> Load:
        """What there is to do."""
        with self._changed:
            return Load(len(self._running), self._num_waiting())

    @property
    def is_alive(self) -> bool:
        """Whether requests are still worked off."""
        return self._thread.is_alive()

    def stop(self, timeout: float = 2.0) -> None:
        """Fail what runs or waits with `StoppedError`, and end the thread after its step.

        Args:
            timeout: seconds to wait for the thread.
        """
        with self._changed:
            self._stopping = True
            left = [*self._waiting, *self._running.values()]
            left += [self._call] if self._call is not None else []
            self._waiting.clear()
            self._changed.notify()
        for item in left:
            if _resolve(item.future, error=StoppedError()):
                self.count("failed")
        self._thread.join(timeout)

    def _queue(self, item: Any) -> Future[Any]:
        with self._changed:
            if self._stopping:
                raise StoppedError()
            if (number := self._num_waiting()) >= self._max_waiting:
                raise QueueFullError(number)
            self._waiting.append(item)
            self._changed.notify()
        return item.future

    def _num_waiting(self) -> int:
        return sum(not item.future.cancelled() for item in self._waiting)

    def _work(self) -> None:
        while (item := self._first()) is not None:
            if isinstance(item, _Call):
                item.run()
                self._call = None
            else:
                self._run_batch()
        self._running.clear()

    def _first(self) -> _Sequence | _Call | None:
        """What is next, once there is something; a call is taken out. None at the end."""
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
        """Work off sequences until none is left, or a call is next and those before it are done."""
        try:
            began = time.perf_counter()
            batch = self.generation.make_batch(self._max_batch, self._hand_on)
            going_on = self._renew(batch)
            with batch.active():
                while going_on:
                    for output in batch.step():
                        self._end(output)
                    self._see(batch.stats, began)
                    going_on = self._renew(batch)
            self._ended = self._see(batch.stats, began)
        except Exception as error:  # noqa: BLE001 - whatever it is, others can still be answered
            self._fail(error)

    def _renew(self, batch: OpenBatch) -> bool:
        """Take out who has gone, let in who waits; whether anything is left to run."""
        for name in batch.running:
            if self._running[name].future.done():
                output = batch.cancel(name)
                assert output is not None
                self._end(output)
        for sequence in self._admitted(batch.num_free):
            self._add(batch, sequence)
        return batch.unfinished and not self._stopping

    def _add(self, batch: OpenBatch, sequence: _Sequence) -> None:
        ready = sequence.ready
        try:
            batch.add(ready.request, ready.prepared)
        except SpecError as error:
            # A processor that cannot be copied, for instance.
            with self._changed:
                del self._running[ready.request.request_id]
            self._settle(sequence, error=error)
            return
        prompt_tokens = self._ended.prompt_tokens + len(ready.request.prompt)
        self._ended = replace(self._ended, prompt_tokens=prompt_tokens)

    def _admitted(self, places: int) -> list[_Sequence]:
        """Sequences from the head of the queue, up to the first call."""
        found: list[_Sequence] = []
        with self._changed:
            while self._waiting and len(found) < places:
                first = self._waiting[0]
                if isinstance(first, _Call):
                    break
                self._waiting.popleft()
                if first.future.cancelled():
                    self._outcomes["cancelled"] += 1
                    continue
                found.append(first)
                self._running[first.ready.request.request_id] = first
        return found

    def _hand_on(self, name: str, tokens: list[int]) -> None:
        sequence = self._running[name]
        if sequence.future.done():
            # Cancelled, or its listener failed: it leaves before the next step.
            return
        try:
            sequence.on_tokens(tokens)
        except Exception as error:  # noqa: BLE001 - one listener's mistake is no other's
            if not sequence.future.cancelled():
                self._settle(sequence, error=error)

    def _end(self, output: SpecRequestOutput) -> None:
        """Hand over a sequence that has left the batch, and count it."""
        sequence = self._running[output.request_id]
        with self._changed:
            del self._running[output.request_id]
        assert output.spec_stats is not None
        self._ended = self._ended.plus(SpecStats([output.spec_stats]))
        if output.error is not None:
            self._settle(sequence, error=SequenceError(output.error))
        else:
            self._settle(sequence, output.generated_tokens)

    def _fail(self, error: Exception) -> None:
        """Tell all who ran; where nobody did, who is next, or it would be tried forever."""
        with self._changed:
            failed = [*self._running.values()]
            self._running.clear()
            if not failed and self._waiting:
                first = self._waiting.popleft()
                assert isinstance(first, _Sequence)
                failed = [first]
        self._ended = self._seen
        for sequence in failed:
            self._settle(sequence, error=error)

    def _settle(
        self, sequence: _Sequence, tokens: list[int] | None = None, error: Exception | None = None
    ) -> None:
        """Give a future its outcome, unless it has one; count what came of the request."""
        if _resolve(sequence.future, tokens, error):
            self.count("answered" if error is None else "failed")
        elif sequence.future.cancelled():
            self.count("cancelled")

    def _see(self, stats: SpecStats, began: float) -> Counts:
        """Publish what has been counted with a batch that began then."""
        busy = self._ended.busy_seconds + time.perf_counter() - began
        self._seen = replace(self._ended.plus(stats), busy_seconds=busy)
        return self._seen
