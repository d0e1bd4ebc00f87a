"""A batch that requests join and leave: each is answered as if it were alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_spec.engine.decode.open_batch import OpenBatch
from hf_spec.generation.open_generation import OpenGeneration
from tests import tiny_models

NEW_TOKENS = 14
PROMPTS = [
    tiny_models.repetitive_prompt(length, seed=length)[0].tolist() for length in (21, 3, 14, 1, 9)
]


def generation(name: str = "llama", strategy: str = "lookup") -> OpenGeneration:
    given = tiny_models.speculation(name, strategy)
    model = tiny_models.build(name)
    return OpenGeneration(model, given["spec_strategy"], given.get("assistant"), None)


def greedy(new_tokens: int = NEW_TOKENS, **settings: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **settings)


def drawn(**settings: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=0, **settings
    )


def alone(prompt: list[int], config: GenerationConfig, name: str = "llama") -> list[int]:
    ids = torch.tensor([prompt])
    output = tiny_models.build(name).generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    return output[0, len(prompt) :].tolist()


def join_one_by_one(
    own: OpenGeneration, configs: list[GenerationConfig], num_slots: int = 3
) -> dict[str, list[int]]:
    """The prompts in turn, a newcomer every second step where a slot is free; what was streamed."""
    streamed: dict[str, list[int]] = {str(number): [] for number in range(len(configs))}
    batch = own.make_batch(num_slots, lambda name, tokens: streamed[name].extend(tokens))
    waiting = [
        own.prepare(str(number), PROMPTS[number % len(PROMPTS)], config)
        for number, config in enumerate(configs)
    ]
    first = waiting.pop(0)
    batch.add(first.request, first.prepared)
    steps = 0
    with batch.active():
        while batch.unfinished or waiting:
            if waiting and batch.num_free and steps % 2:
                ready = waiting.pop(0)
                batch.add(ready.request, ready.prepared)
            outputs = batch.step() if batch.unfinished else []
            for output in outputs:
                assert streamed[output.request_id] == output.generated_tokens
                assert output.spec_stats is not None
                assert output.spec_stats.new_tokens == len(output.generated_tokens)
            steps += 1
            assert steps < 1000
    return streamed


@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
def test_each_is_answered_as_if_alone(strategy: str) -> None:
    found = join_one_by_one(generation(strategy=strategy), [greedy() for _ in range(7)])
    expected = [alone(PROMPTS[number % len(PROMPTS)], greedy()) for number in range(7)]
    assert list(found.values()) == expected


@pytest.mark.parametrize("strategy", ["lookup", "draft", "falcon", "sdsat"])
def test_greedy_requests_stay_so_beside_others_that_draw(strategy: str) -> None:
    torch.manual_seed(3)
    kinds = [drawn(temperature=3.0) if number % 2 else greedy() for number in range(7)]
    found = join_one_by_one(generation(strategy=strategy), kinds)
    for number in range(0, 7, 2):
        assert found[str(number)] == alone(PROMPTS[number % len(PROMPTS)], greedy())
    unlike = [found[str(n)] != alone(PROMPTS[n % len(PROMPTS)], greedy()) for n in range(1, 7, 2)]
    assert any(unlike), "nobody drew"


def test_each_has_its_own_processors_and_end() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2, "new_tokens": 5},
        {"bad_words_ids": [[7]]},
    ]
    configs = [greedy(**one) for one in settings]
    # A word that one says ends it, and nobody else.
    text = alone(PROMPTS[0], greedy())
    configs[0].eos_token_id = text[4]
    expected = [alone(PROMPTS[number], greedy(**one)) for number, one in enumerate(settings)]
    expected[0] = text[: text.index(text[4]) + 1]
    assert list(join_one_by_one(generation(), configs).values()) == expected


def run(batch: OpenBatch, steps: int) -> None:
    with batch.active():
        for _ in range(steps):
            batch.step()


def test_a_cancelled_request_leaves_its_slot_and_disturbs_nobody() -> None:
    own = generation()
    streamed: dict[str, list[int]] = {"stays": [], "goes": [], "comes": []}
    batch = own.make_batch(2, lambda name, tokens: streamed[name].extend(tokens))
    for number, name in enumerate(("stays", "goes")):
        ready = own.prepare(name, PROMPTS[number], greedy(60))
        batch.add(ready.request, ready.prepared)
    run(batch, 3)
    output = batch.cancel("goes")
    assert output is not None
    assert output.generated_tokens == streamed["goes"]
    assert 0 < len(streamed["goes"]) < 60
    assert batch.cancel("goes") is None
    assert (batch.running, batch.num_free) == (["stays"], 1)
    ready = own.prepare("comes", PROMPTS[4], greedy())
    batch.add(ready.request, ready.prepared)
    with batch.active():
        while batch.unfinished:
            batch.step()
    assert streamed["stays"] == alone(PROMPTS[0], greedy(60))
    assert streamed["comes"] == alone(PROMPTS[4], greedy())
    assert streamed["goes"] == alone(PROMPTS[1], greedy(60))[: len(streamed["goes"])]


def test_memory_is_that_of_the_slots() -> None:
    def measure(count: int) -> tuple[int, Any, int]:
        own = generation()
        batch = own.make_batch(2, lambda name, tokens: None)
        for number in range(count):
            ready = own.prepare(str(number), PROMPTS[number % 2], greedy(6))
            batch.add(ready.request, ready.prepared)
            with batch.active():
                while batch.unfinished:
                    batch.step()
        state = batch._state
        return batch._target.pool.nbytes(), state.frames.shape, len(state.stats.rows)

    assert measure(12) == measure(2)


@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
def test_memory_goes_with_the_batch_and_waits_for_no_collector(strategy: str) -> None:
    batch = generation(strategy=strategy).make_batch(2, lambda name, tokens: None)
    ready = generation(strategy=strategy).prepare("one", PROMPTS[0], greedy())
    batch.add(ready.request, ready.prepared)
    with batch.active():
        while batch.unfinished:
            batch.step()
    left = weakref.ref(batch), weakref.ref(batch._target)
    gc.disable()
    try:
        del batch
        assert [one() for one in left] == [None, None]
    finally:
        gc.enable()
