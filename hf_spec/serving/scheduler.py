"""One thread that runs one model: requests join its batch in the order in which they came.

A request is a `Future`: cancelling it takes the sequence out before the next step, wherever it is.
The batch lives as long as anything runs, and its memory with it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hf_spec.decoding.open_batch import OpenBatch
from hf_spec.generation.open_generation import OpenGeneration, Ready
from hf_spec.outputs import SpecRequestOutput, SpecStats
from hf_spec.serving.counts import Counts, Load


class QueueFullError(RuntimeError):
    """So many requests wait that no more are taken."""


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
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the result
            self.future.set_exception(error)


class Scheduler:
    """Answers requests with one model, at most `max_batch` at a time.

    Its methods may be called from any thread; what they are given is called in its own.
    """

    def __init__(self, generation: OpenGeneration, max_batch: int, max_waiting: int):
        self.generation = generation
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._waiting: deque[_Sequence | _Call] = deque()
        self._running: dict[str, _Sequence] = {}
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

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel everything and end the thread, within `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout)

    def _queue(self, item: Any) -> Future[Any]:
        with self._changed:
            if self._stopping:
                raise QueueFullError("the server is about to stop")
            if (number := self._num_waiting()) >= self._max_waiting:
                raise QueueFullError(f"{number} requests wait already; try again later")
            self._waiting.append(item)
            self._changed.notify()
        return item.future

    def _num_waiting(self) -> int:
        return sum(not item.future.cancelled() for item in self._waiting)

    def _work(self) -> None:
        while (item := self._first()) is not None:
            if isinstance(item, _Call):
                item.run()
            else:
                self._run_batch()
        for left in (*self._waiting, *self._running.values()):
            left.future.cancel()

    def _first(self) -> _Sequence | _Call | None:
        """What is next, once there is something; a call is taken out. None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            first = self._waiting[0]
            return self._waiting.popleft() if isinstance(first, _Call) else first

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
            ready = sequence.ready
            batch.add(ready.request, ready.prepared)
            prompt_tokens = self._ended.prompt_tokens + len(ready.request.prompt)
            self._ended = replace(self._ended, prompt_tokens=prompt_tokens)
        return batch.unfinished and not self._stopping

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
            self._settle(sequence, error=error)

    def _end(self, output: SpecRequestOutput) -> None:
        """Hand over a sequence that has left the batch, and count it."""
        sequence = self._running[output.request_id]
        with self._changed:
            del self._running[output.request_id]
        assert output.spec_stats is not None
        self._ended = self._ended.plus(SpecStats([output.spec_stats]))
        if sequence.future.cancelled():
            self.count("cancelled")
        elif not sequence.future.done():
            self._settle(sequence, output.generated_tokens)

    def _fail(self, error: Exception) -> None:
        """Tell all who ran; where nobody did, who is next, or it would be tried forever."""
        with self._changed:
            failed = [*self._running.values()]
            self._running.clear()
            if not failed:
                first = self._waiting.popleft()
                assert isinstance(first, _Sequence)
                failed = [first]
        self._ended = self._seen
        for sequence in failed:
            if not sequence.future.done():
                self._settle(sequence, error=error)

    def _settle(
        self, sequence: _Sequence, tokens: list[int] | None = None, error: Exception | None = None
    ) -> None:
        """Let a future have its end, unless it was cancelled at this very moment."""
        if not sequence.future.set_running_or_notify_cancel():
            self.count("cancelled")
        elif tokens is None:
            self.count("failed")
            sequence.future.set_exception(error)
        else:
            self.count("answered")
            sequence.future.set_result(tokens)

    def _see(self, stats: SpecStats, began: float) -> Counts:
        """Publish what has been counted with a batch that began then."""
        busy = self._ended.busy_seconds + time.perf_counter() - began
        self._seen = replace(self._ended.plus(stats), busy_seconds=busy)
        return self._seen
