"""Continuous batching: reused slots, shared forward passes, and memory that does not grow."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, MaxLengthCriteria
from transformers.generation import EosTokenCriteria

from hf_spec.engine.decode.continuous_batching import (
    ContinuousBatch,
    OpenBatch,
    Prepared,
    Request,
    iterate_finished,
)
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.generation.open_generation import OpenGeneration
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.draft_model.loading import DraftConfig
from hf_spec.methods.lookup.drafter import LookupConfig, LookupDrafter
from hf_spec.methods.registry import make_drafter, parse_strategy
from tests import tiny_models
from tests.open_requests import PROMPTS, alone, drawn, generation, greedy
from tests.tiers import FEW_STRATEGIES

# Texts longer than the initial capacity of the pool would hide growth.
NEW_TOKENS = 6


def requests(count: int, lengths: tuple[int, ...] = (9, 2, 5, 14)) -> list[Request]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for index in range(count):
        pattern = torch.randint(3, tiny_models.VOCAB, (3,), generator=generator)
        prompt = pattern.repeat(20)[: lengths[index % len(lengths)]].tolist()
        found.append(Request(index, f"name {index}", index, prompt))
    return found


def prepare(request: Request) -> Prepared:
    longest = MaxLengthCriteria(len(request.prompt) + NEW_TOKENS - request.index % 3)
    return Prepared([], StopRules([longest], 1), do_sample=False)


def batch_of(
    count: int, drafter: Drafter | None = None, num_slots: int = 3, **options: Any
) -> ContinuousBatch:
    drafter = drafter or LookupDrafter(LookupConfig())
    model = tiny_models.build("llama")
    return ContinuousBatch(model, drafter, requests(count), prepare, num_slots, **options)


def drain(batch: ContinuousBatch) -> list[int]:
    """Run to the end; return the bytes of keys and values after every step."""
    sizes = []
    with batch.active():
        while batch.unfinished:
            batch.step()
            sizes.append(batch._target.rows.pool.nbytes())
    return sizes


def test_a_finished_row_hands_its_slot_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trees: list[tuple[DraftTree, list[list[int]]]] = []
    works = ModelRunner.forward

    def forward(self: Any, tree: DraftTree, sequences: Any, **options: Any) -> Any:
        trees.append((tree, [list(tokens) for tokens in sequences]))
        return works(self, tree, sequences, **options)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    batch = batch_of(8)
    drain(batch)
    waiting = [request.prompt for request in requests(8)]
    for tree, texts in trees:
        busy = sum(bool(tree.nodes(row)) for row in range(3))
        for row, text in enumerate(texts):
            if tree.nodes(row) and text in waiting:
                waiting.remove(text)
        assert busy == 3 or not waiting, "a slot is free while prompts wait"
    assert waiting == []
    # A new prompt shares a forward pass with the drafts of rows that are already decoding.
    newcomers = {tuple(request.prompt) for request in requests(8)[3:]}
    for prompt in newcomers:
        tree, texts = next((t, s) for t, s in trees if list(prompt) in s)
        assert sum(bool(tree.nodes(row)) for row in range(3)) > 1
    assert len(trees) == batch.stats.target_forwards


@pytest.mark.parametrize("strategy", ["lookup", "draft", "falcon"])
def test_memory_is_that_of_the_slots(strategy: str) -> None:
    """Twenty prompts need as much memory as six: KV pool, padded ids, and drafter state."""

    def measure(count: int) -> tuple[list[int], Any, Any]:
        model = tiny_models.build("llama")
        arguments = tiny_models.speculation("llama", strategy)
        config = parse_strategy(arguments["spec_strategy"])
        drafter: Any = make_drafter(config, model, arguments.get("assistant"))
        batch = batch_of(count, drafter)
        sizes = drain(batch)
        state = batch._state
        rows = (state.padded_ids.shape, len(state.tokens), len(state.scores))
        runner = getattr(drafter, "_runner", None)
        kept = 0 if runner is None else getattr(runner, "rows", runner).pool.nbytes()
        pairs = getattr(drafter, "_pairs", None)
        per_row = [len(getattr(drafter, "_indexes", ())), len(pairs.rows) if pairs else 0]
        return sizes, rows, (kept, per_row)

    few, many = measure(6), measure(20)
    assert len(many[0]) > len(few[0])
    assert len(set(few[0] + many[0])) == 1
    assert few[1:] == many[1:]


def test_no_more_slots_than_requests() -> None:
    sizes = drain(batch_of(2, num_slots=50))
    assert set(sizes) == set(drain(batch_of(8, num_slots=2)))


def test_a_slot_forgets_the_sequence_before() -> None:
    """With stale state a lookup would copy from another text, and a draft model attend to it."""
    drafter = DraftModelDrafter(
        DraftConfig(length_policy="heuristic"), tiny_models.draft_model("llama")
    )
    seen: list[tuple[int, int]] = []
    works = drafter.restart

    def restart(row: int) -> None:
        works(row)
        assert drafter._runner is not None
        seen.append((drafter._runner.rows.stored[row], drafter.policy.limit(row)))

    drafter.restart = restart  # type: ignore[method-assign]
    drain(batch_of(7, drafter))
    # The other three requests start with the generation.
    assert seen == [(0, 5)] * 4


def test_every_sequence_has_its_own_rules() -> None:
    outputs = {output.request_id: output for output in iterate_finished(batch_of(7))}
    for request in requests(7):
        output = outputs[request.request_id]
        assert len(output.generated_tokens) == NEW_TOKENS - request.index % 3
        plain = tiny_models.build("llama").generate(
            torch.tensor([request.prompt]),
            max_new_tokens=len(output.generated_tokens),
            do_sample=False,
        )
        assert plain[0].tolist() == output.prompt_ids + output.generated_tokens


def test_what_is_refused_for_its_length_is_refused_at_once() -> None:
    asked: list[int] = []

    def refuse(request: Request) -> Prepared:
        asked.append(len(request.prompt))
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        ContinuousBatch(
            tiny_models.build("llama"), LookupDrafter(LookupConfig()), requests(8), refuse, 3
        )
    assert asked == [14], "the longest one is asked for first"


def test_a_drafter_starts_with_the_first_prompts() -> None:
    """A drafter that measures the cost of a round needs tokens to run."""

    seen: list[list[list[int]]] = []

    class Starts(LookupDrafter):
        def start(self, state: GenerationState) -> None:
            seen.append([list(tokens) for tokens in state.tokens])
            super().start(state)

    drafter = Starts(LookupConfig())
    batch = batch_of(5, drafter)
    for _ in range(2):
        with batch.active():
            batch.step()
    assert seen == [[request.prompt for request in requests(3)]]


def test_statistics_are_those_of_all_requests() -> None:
    batch = batch_of(7)
    drain(batch)
    stats = batch.stats
    assert [row.new_tokens for row in stats.rows] == [NEW_TOKENS - i % 3 for i in range(7)]
    assert stats.target_forwards < sum(row.target_forwards for row in stats.rows)
    assert stats.target_padding == 0
    prompts = sum(len(request.prompt) - 1 for request in requests(7))
    roots = sum(row.target_forwards for row in stats.rows)
    assert stats.target_tokens == prompts + roots + stats.drafted_tokens


def test_an_end_of_sequence_is_known_to_drafters() -> None:
    def with_end(request: Request) -> Prepared:
        longest = MaxLengthCriteria(len(request.prompt) + NEW_TOKENS)
        return Prepared([], StopRules([longest, EosTokenCriteria([7])], 1), do_sample=False)

    batch = ContinuousBatch(
        tiny_models.build("llama"), LookupDrafter(LookupConfig()), requests(2), with_end, 2
    )
    assert batch._state.stop.ends_sequence(7)


# An open batch, which requests join and leave: each output is the same as without the others.


def join_one_by_one(
    served: OpenGeneration, configs: list[GenerationConfig], num_slots: int = 3
) -> dict[str, list[int]]:
    """Add a prompt every second step if a slot is free; return the streamed tokens."""
    streamed: dict[str, list[int]] = {str(number): [] for number in range(len(configs))}
    batch = served.make_batch(num_slots, lambda name, tokens: streamed[name].extend(tokens))
    waiting = [
        served.prepare(str(number), PROMPTS[number % len(PROMPTS)], config)
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


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
def test_each_is_answered_as_if_alone(strategy: str) -> None:
    found = join_one_by_one(generation(strategy=strategy), [greedy() for _ in range(7)])
    expected = [alone(PROMPTS[number % len(PROMPTS)], greedy()) for number in range(7)]
    assert list(found.values()) == expected


@pytest.mark.by_default(strategy=("draft", "falcon"))
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
    # A token that request 0 generates ends this request, but not the others.
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


def test_memory_of_an_open_batch_is_that_of_the_slots() -> None:
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
        return batch._target.rows.pool.nbytes(), state.padded_ids.shape, len(state.stats.rows)

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
