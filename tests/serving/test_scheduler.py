"""The scheduler thread: order, cancellation, failures, and counters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hf_spec.serving.errors import RequestError, StoppedError
from hf_spec.serving.scheduler import Scheduler
from tests.open_requests import PROMPTS, alone, generation, greedy

LIMIT = 60.0


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(generation(), max_batch=2, max_waiting=8)
    yield made
    made.stop(LIMIT)
    assert not made.is_alive


def submit(scheduler: Scheduler, number: int, listener: Any = None, new_tokens: int = 14) -> Any:
    prompt = PROMPTS[number % len(PROMPTS)]
    ready = scheduler.generation.prepare(str(number), prompt, greedy(new_tokens))
    return scheduler.submit(ready, listener or (lambda tokens: None))


def test_every_request_gets_its_own_tokens(scheduler: Scheduler) -> None:
    heard: dict[int, list[int]] = {number: [] for number in range(7)}
    futures = [submit(scheduler, number, heard[number].extend) for number in range(7)]
    found = [future.result(LIMIT) for future in futures]
    assert found == [alone(PROMPTS[number % len(PROMPTS)], greedy()) for number in range(7)]
    assert list(heard.values()) == found
    assert scheduler.counts.outcomes == {"answered": 7}
    assert scheduler.counts.prompt_tokens == sum(len(PROMPTS[n % len(PROMPTS)]) for n in range(7))


def test_a_call_has_the_model_to_itself_and_keeps_its_place(scheduler: Scheduler) -> None:
    order: list[str] = []
    first = submit(scheduler, 0, lambda tokens: order.append("first"))
    call = scheduler.run_alone(lambda: (order.append("call"), scheduler.counts)[1])
    last = submit(scheduler, 1, lambda tokens: order.append("last"))
    for future in (first, last):
        future.result(LIMIT)
    counts = call.result(LIMIT)
    assert (counts.running, counts.queue_length) == (0, 1)
    assert order == sorted(order, key=["first", "call", "last"].index)
    failing = scheduler.run_alone(lambda: 1 / 0)
    assert isinstance(failing.exception(LIMIT), ZeroDivisionError)


def test_cancelled_before_and_while_it_runs(scheduler: Scheduler) -> None:
    started, go_on = threading.Event(), threading.Event()

    def hold(tokens: list[int]) -> None:
        started.set()
        go_on.wait(LIMIT)

    running = submit(scheduler, 0, hold, new_tokens=200)
    assert started.wait(LIMIT)
    waiting = submit(scheduler, 1)
    assert running.cancel()
    assert waiting.cancel()
    assert scheduler.counts.queue_length == 0
    go_on.set()
    assert submit(scheduler, 2).result(LIMIT) == alone(PROMPTS[2], greedy())
    assert scheduler.counts.outcomes == {"cancelled": 2, "answered": 1}
    assert scheduler.counts.generated_tokens < 100


def test_one_listeners_mistake_is_no_others(scheduler: Scheduler) -> None:
    def fails(tokens: list[int]) -> None:
        raise LookupError("no such reader")

    bad, good = submit(scheduler, 0, fails), submit(scheduler, 1)
    assert good.result(LIMIT) == alone(PROMPTS[1], greedy())
    assert isinstance(bad.exception(LIMIT), LookupError)
    assert scheduler.counts.outcomes == {"answered": 1, "failed": 1}


def test_a_batch_that_cannot_begin_fails_one_request_at_a_time(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes, failures = scheduler.generation.make_batch, iter([MemoryError("full")])

    def make(*arguments: Any) -> Any:
        for error in failures:
            raise error
        return makes(*arguments)

    monkeypatch.setattr(scheduler.generation, "make_batch", make)
    assert isinstance(submit(scheduler, 0).exception(LIMIT), MemoryError)
    assert submit(scheduler, 1).result(LIMIT) == alone(PROMPTS[1], greedy())


def test_no_more_wait_than_may() -> None:
    scheduler = Scheduler(generation(), max_batch=1, max_waiting=1)
    started, go_on = threading.Event(), threading.Event()

    def hold(tokens: list[int]) -> None:
        started.set()
        go_on.wait(LIMIT)

    submit(scheduler, 0, hold)
    assert started.wait(LIMIT)
    waits = submit(scheduler, 1)
    with pytest.raises(RequestError, match="1 requests wait already") as full:
        submit(scheduler, 2)
    assert (full.value.status, full.value.headers) == (429, {"Retry-After": "1"})
    go_on.set()
    assert waits.result(LIMIT)
    scheduler.stop(LIMIT)
    with pytest.raises(StoppedError):
        submit(scheduler, 3)


def test_an_error_of_one_request_leaves_the_others_exact(scheduler: Scheduler) -> None:
    # No vocabulary contains this token id, which is forced in the last step.
    config = greedy(forced_eos_token_id=10**6)
    poison = scheduler.generation.prepare("poison", PROMPTS[3], config)
    futures = [submit(scheduler, 0), scheduler.submit(poison, lambda tokens: None)]
    futures += [submit(scheduler, number) for number in (1, 2)]
    error = futures.pop(1).exception(LIMIT)
    assert isinstance(error, RequestError)
    assert error.status == 422
    assert "IndexError" in str(error)
    found = [future.result(LIMIT) for future in futures]
    assert found == [alone(PROMPTS[number], greedy()) for number in (0, 1, 2)]
    assert scheduler.counts.outcomes == {"answered": 3, "failed": 1}


def test_stopping_fails_what_is_left_at_once() -> None:
    scheduler = Scheduler(generation(), max_batch=1, max_waiting=8)
    futures = [submit(scheduler, number, new_tokens=200) for number in range(3)]
    scheduler.stop(LIMIT)
    assert not scheduler.is_alive
    assert isinstance(futures[-1].exception(0), StoppedError)
    assert all(future.done() for future in futures)
    assert sum(scheduler.counts.outcomes.values()) == 3
    assert (scheduler.counts.running, scheduler.counts.queue_length) == (0, 0)
