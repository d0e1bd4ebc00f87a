"""An error in one sequence of a continuous batch ends only that sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_spec import BatchStreamer
from tests import tiny_models
from tests.open_requests import (
    NEW_TOKENS,
    PROMPTS,
    alone,
    drawn,
    generation,
    greedy,
)
from tests.tiers import FEW_STRATEGIES

# Processors and criteria fail only for the prompt that begins with this token.
POISON = 5
# Number of new tokens before the error.
GRACE = 4
PROMPT = [POISON, 7, 8, 7, 8]


def is_due(input_ids: Tensor) -> bool:
    return bool((input_ids[:, 0] == POISON).any()) and input_ids.shape[1] >= len(PROMPT) + GRACE


class RaisingProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if is_due(input_ids):
            raise IndexError("no such token")
        return scores


class NanProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, torch.nan) if is_due(input_ids) else scores


class RaisingCriterion(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if is_due(input_ids):
            raise ZeroDivisionError("cannot judge")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def batch(strategy: str, prompts: list[list[int]], **settings: Any) -> dict[str, Any]:
    given = {"do_sample": False, **tiny_models.speculation("llama", strategy), **settings}
    model = tiny_models.build("llama")
    return model.generate_batch(prompts, max_new_tokens=NEW_TOKENS, max_batch=3, **given)


INNOCENT = PROMPTS[:3] + PROMPTS[4:]
MIXED = [*INNOCENT[:1], PROMPT, *INNOCENT[1:]]


@pytest.mark.by_default(strategy=("lookup", "tree"))
@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: {"logits_processor": [RaisingProcessor()]}, "IndexError: no such token"),
        (lambda: {"stopping_criteria": [RaisingCriterion()]}, "ZeroDivisionError: cannot judge"),
    ],
)
def test_the_others_go_on_and_stay_exact(
    strategy: str, make: Callable[[], dict[str, Any]], said: str
) -> None:
    expected = batch(strategy, INNOCENT, **make())
    found = batch(strategy, MIXED, **make())
    failed = found.pop("req_1")
    assert [output.generated_tokens for output in found.values()] == [
        output.generated_tokens for output in expected.values()
    ]
    assert all(output.error is None for output in found.values())
    assert failed.error == said
    assert failed.status == RequestStatus.FAILED
    before = alone(PROMPT, greedy())[: len(failed.generated_tokens)]
    assert failed.generated_tokens == before
    assert len(before) < NEW_TOKENS


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
def test_scores_from_which_nothing_can_be_drawn(strategy: str) -> None:
    found = batch(strategy, MIXED, logits_processor=[NanProcessor()], do_sample=True)
    failed = found.pop("req_1")
    assert failed.error is not None
    assert "no token can be drawn" in failed.error
    assert all(output.error is None for output in found.values())
    assert {len(output.generated_tokens) for output in found.values()} <= {*range(1, 15)}


def test_plain_greedy_decoding_takes_nan_and_so_does_a_greedy_row() -> None:
    """As in plain `generate()`, the argmax of scores with NaN is taken without an error."""
    found = batch("lookup", MIXED, logits_processor=[NanProcessor()])["req_1"]
    processors = {"logits_processor": [NanProcessor()]}
    ids = torch.tensor([PROMPT])
    plain = tiny_models.build("llama").generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=False, **processors
    )
    assert found.error is None
    assert found.generated_tokens == plain[0, len(PROMPT) :].tolist()


def test_a_listener_learns_the_end_and_the_log_has_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[int] = []
    streamed: dict[int, list[int]] = {}
    streamer = BatchStreamer(
        lambda row, tokens: streamed.setdefault(row, []).extend(tokens), ended.append
    )
    with caplog.at_level(logging.WARNING, "hf_spec"):
        found = batch("lookup", MIXED, logits_processor=[RaisingProcessor()], streamer=streamer)
    assert sorted(ended) == list(range(len(MIXED)))
    assert streamed == {n: found[f"req_{n}"].generated_tokens for n in range(len(MIXED))}
    assert "IndexError: no such token" in caplog.text


@pytest.mark.parametrize("drafts", ["lookup", "draft", "falcon", "none"])
def test_a_slot_is_free_for_the_next_request(drafts: str) -> None:
    """Requests have their own settings, as on a server."""
    own = generation(strategy=drafts)
    outputs = {}
    streams: dict[str, list[int]] = {}
    live = own.make_batch(2, lambda name, tokens: streams.setdefault(name, []).extend(tokens))
    # The token is forced in the last step and is outside of the vocabulary.
    poison = greedy(forced_eos_token_id=10**6)
    nothing = drawn(temperature=1e-45)
    configs = [greedy(), poison, greedy(), nothing, poison, greedy(repetition_penalty=1.3)]
    waiting = [
        own.prepare(str(n), PROMPTS[n % len(PROMPTS)], config) for n, config in enumerate(configs)
    ]
    first = waiting.pop(0)
    live.add(first.request, first.prepared)
    with live.active():
        while live.unfinished or waiting:
            while waiting and live.num_free:
                ready = waiting.pop(0)
                live.add(ready.request, ready.prepared)
            outputs |= {output.request_id: output for output in live.step()}
    assert {name for name, output in outputs.items() if output.error} == {"1", "3", "4"}
    for name in ("0", "2", "5"):
        number = int(name)
        expected = alone(PROMPTS[number % len(PROMPTS)], configs[number])
        assert outputs[name].generated_tokens == streams[name] == expected


def test_generate_raises_as_before() -> None:
    ids = torch.tensor([PROMPT])
    model = tiny_models.build("llama")
    given = {"max_new_tokens": NEW_TOKENS, "spec_strategy": "lookup"}
    for processor, error in ((RaisingProcessor(), IndexError), (NanProcessor(), RuntimeError)):
        with pytest.raises(error):
            model.generate(ids, do_sample=True, logits_processor=[processor], **given)
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, do_sample=False, stopping_criteria=[RaisingCriterion()], **given)
