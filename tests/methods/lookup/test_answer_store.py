"""Store of earlier answers: search, drafts, recording, and exact output."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from hf_spec import AssistantError, AutoConfig, LookupConfig, LookupStore, OptionError
from hf_spec.generation.open_generation import OpenGeneration
from hf_spec.methods.lookup.answer_store import (
    LONGEST_MATCH,
    MIN_PROBABILITY,
    SEPARATOR,
    StoredDraft,
    find_draft,
)
from tests.open_requests import PROMPTS, greedy
from tests.test_distribution import ALPHA, REPETITIVE, exact, p_value, tiny
from tests.tiny_models import TIMINGS, VOCAB, build, draft_model, ragged_batch


def stored(store: LookupStore) -> list[list[int]]:
    """Return the answers in a store, oldest first."""
    answers: list[list[int]] = [[]]
    for token in store.text.tolist():
        if token == SEPARATOR:
            answers.append([])
        else:
            answers[-1].append(token)
    return answers[:-1]


def random_answers(count: int, tokens: int = 4, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(tokens) for _ in range(generator.randint(1, 30))] for _ in range(count)
    ]


class TestStore:
    @pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
    def test_the_newest_answers_that_fit_are_held(self, size: int) -> None:
        store, answers = LookupStore(size), random_answers(60)
        for number, answer in enumerate(answers, start=1):
            store.add(answer)
            expected: list[list[int]] = []
            room = size
            for one in reversed(answers[:number]):
                kept = one[-(size - 1) :] if size > 1 else []
                if not kept or len(kept) + 1 > room:
                    break
                expected.insert(0, kept)
                room -= len(kept) + 1
            assert stored(store) == expected
            assert len(store) <= size

    def test_an_answer_longer_than_the_store(self) -> None:
        store = LookupStore(5)
        store.add(range(20))
        assert stored(store) == [[16, 17, 18, 19]]

    def test_empty_answers_and_clear(self) -> None:
        store = LookupStore()
        store.add([])
        assert len(store) == 0
        store.add([1, 2])
        store.clear()
        assert stored(store) == []
        store.add([3])
        assert stored(store) == [[3]]

    @pytest.mark.parametrize("size", [0, -1, 2.5, True, "9", None])
    def test_sizes(self, size: object) -> None:
        with pytest.raises(OptionError, match="max_tokens="):
            LookupStore(size)  # type: ignore[arg-type]

    def test_another_vocabulary_is_refused_while_it_holds_anything(self) -> None:
        store = LookupStore()
        store.serve(97)
        store.serve(98)
        store.add([1, 2, 3])
        store.serve(98)
        with pytest.raises(OptionError, match="vocabulary of 98 tokens, but the model has 97"):
            store.serve(97)
        store.clear()
        store.serve(97)

    def test_threads_lose_nothing(self) -> None:
        store = LookupStore(100_000)
        answers = random_answers(50)

        def work() -> None:
            for answer in answers:
                store.add(answer)
                find_draft(store.text, answer, 8, 8)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(stored(store)) == sorted(answers * 4)


def slowly(
    answers: list[list[int]], last: list[int], max_nodes: int, max_depth: int, min_match: int
) -> StoredDraft:
    """Return the same draft as `find_draft`, by counting in lists."""
    best = StoredDraft([], [], [])
    for length in range(min_match, min(len(last), LONGEST_MATCH) + 1):
        rests = [
            answer[end:]
            for answer in answers
            for end in range(length, len(answer))
            if answer[end - length : end] == last[-length:]
        ]
        made = draft(rests, min(max_nodes, length), max_depth)
        # A longer match at the same positions never scores less, so `>=` selects it.
        if made.score >= best.score:
            best = made
    return best


def draft(rests: list[list[int]], max_nodes: int, max_depth: int) -> StoredDraft:
    tokens, parents, probs, score = [], [], [], 0.0
    paths: list[tuple[int, ...]] = [()]
    reach = {(): 1.0}
    while len(tokens) < max_nodes:
        options = []
        for path in paths:
            if len(path) == max_depth:
                continue
            here = [rest for rest in rests if tuple(rest[: len(path)]) == path]
            for token in {rest[len(path)] for rest in here if len(rest) > len(path)}:
                on = (*path, token)
                share = sum(tuple(rest[: len(on)]) == on for rest in here) / len(here)
                if on not in paths and reach[path] * share >= MIN_PROBABILITY:
                    options.append((reach[path] * share, on, share))
        if not options:
            break
        value, path, share = max(options)
        paths.append(path)
        reach[path] = value
        tokens.append(path[-1])
        parents.append(paths.index(path[:-1]))
        probs.append(share)
        score += value
    return StoredDraft(tokens, parents, probs, score)


class TestSuggest:
    @pytest.mark.parametrize("tokens", [2, 3, 6])
    def test_it_counts_what_a_slow_reference_counts(self, tokens: int) -> None:
        store, answers = LookupStore(), random_answers(12, tokens, seed=tokens)
        for answer in answers:
            store.add(answer)
        generator = random.Random(1)
        found = 0
        for _ in range(60):
            source = generator.choice(answers)
            end = generator.randint(1, len(source))
            last = [*[generator.randrange(tokens)] * 2, *source[max(0, end - 9) : end]]
            bounds = generator.randint(1, 9), generator.randint(1, 6), generator.randint(1, 3)
            ours, theirs = find_draft(store.text, last, *bounds), slowly(answers, last, *bounds)
            # Equally probable nodes may be in any order.
            assert ours.score == pytest.approx(theirs.score)
            assert len(ours.tokens) == len(ours.parents) == len(ours.probs)
            assert all(parent <= node for node, parent in enumerate(ours.parents))
            found += bool(ours.tokens)
        assert found > 30

    def test_a_draft_is_as_long_as_the_match(self) -> None:
        text = np.array([*range(50), SEPARATOR], dtype=np.int32)
        for length in (1, 3, 8):
            last = [99, *range(10, 10 + length)]
            found = find_draft(text, last, 40, 40)
            assert found.tokens == list(range(10 + length, 10 + 2 * length))
            assert found.parents == list(range(length))

    def test_counts_make_probabilities(self) -> None:
        store = LookupStore()
        for answer in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 5]):
            store.add(answer)
        found = find_draft(store.text, [1, 2], 9, 9)
        assert found.tokens in ([3, 4], [3, 5])
        assert found.parents == [0, 0]
        assert found.probs == [0.5, 0.25]

    def test_answers_do_not_run_into_each_other(self) -> None:
        store = LookupStore()
        store.add([1, 2])
        store.add([3, 4])
        assert find_draft(store.text, [1, 2], 9, 9).tokens == []
        assert find_draft(store.text, [2, 3], 9, 9).tokens == [4]

    def test_nothing_stored(self) -> None:
        assert find_draft(LookupStore().text, [1, 2], 9, 9).tokens == []

    def test_no_room(self) -> None:
        text = np.array([1, 2, 3, SEPARATOR], dtype=np.int32)
        assert find_draft(text, [1], 9, 0).tokens == []


NEW = 24
CONFIGS: dict[str, Any] = {
    "measured": LookupConfig(),
    "fixed": LookupConfig(copy_length=6, max_draft_tokens=8),
    "auto": AutoConfig(timings=TIMINGS),
}


def inputs(kind: str = "ragged", seed: int = 3) -> dict[str, torch.Tensor]:
    batch = ragged_batch((12, 9, 5), seed)
    # Random prompts: nothing in them repeats.
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, batch["input_ids"].shape, generator=generator)
    batch["input_ids"] = ids * batch["attention_mask"]
    return batch if kind == "ragged" else {name: part[:1] for name, part in batch.items()}


def generate(given: Any, **options: Any) -> Any:
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return build("llama").generate(**given, **{**settings, **options})


@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_second_answer_is_copied_from_the_first(name: str, kind: str) -> None:
    store, given = LookupStore(), inputs(kind)
    plain = generate(given).sequences
    config, assistant = CONFIGS[name], store
    rounds = []
    for _ in range(3):
        output = generate(given, spec_strategy=config, assistant=assistant)
        assert torch.equal(output.sequences, plain)
        rounds.append(output.spec_stats.target_forwards)
    alone = generate(given, spec_strategy=config).spec_stats.target_forwards
    assert rounds[0] >= alone
    assert max(rounds[1:]) < 0.6 * alone
    assert len(store) > 3 * NEW * len(given["input_ids"])


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_that_resemble_earlier_ones(name: str) -> None:
    """A prompt with another first token: the stored answer is drafted and verified."""
    store, given = LookupStore(), inputs("one")
    generate(given, spec_strategy=CONFIGS[name], assistant=store)
    other = {key: value.clone() for key, value in given.items()}
    other["input_ids"][0, 0] = 3 + (other["input_ids"][0, 0] + 1) % 50
    output = generate(other, spec_strategy=CONFIGS[name], assistant=store)
    assert torch.equal(output.sequences, generate(other).sequences)
    assert output.spec_stats.drafted_tokens > 0


def test_drafts_begin_with_the_first_token() -> None:
    store, given = LookupStore(), inputs("one")
    config = LookupConfig(copy_length=NEW, max_draft_tokens=NEW)
    generate(given, spec_strategy=config, assistant=store)
    output = generate(given, spec_strategy=config, assistant=store)
    # The match is the end of the prompt, 12 tokens.
    assert output.spec_stats.rows[0].accepted_by_position[0] >= 1
    assert output.spec_stats.target_forwards <= 1 + NEW // 12


class TestWhatIsStored:
    def test_answers_with_the_end_of_their_prompts(self) -> None:
        store, given = LookupStore(), inputs()
        output = generate(given, spec_strategy="lookup", assistant=store)
        rows = [
            [*ids[mask.bool()].tolist(), -1]
            for ids, mask in zip(
                output.sequences,
                torch.nn.functional.pad(given["attention_mask"], (0, NEW), value=1),
                strict=True,
            )
        ]
        assert sorted(rows) == sorted(split(store))

    def test_every_request_of_a_queue_once(self) -> None:
        store, given = LookupStore(), inputs()
        prompts = [ids[m.bool()].tolist() for ids, m in zip(*given.values(), strict=True)] * 2
        for config in CONFIGS.values():
            store.clear()
            outputs = build("llama").generate_batch(
                prompts, spec_strategy=config, assistant=store, max_batch=2, max_new_tokens=8
            )
            answers = [
                [*p, *o.generated_tokens, -1]
                for p, o in zip(prompts, outputs.values(), strict=True)
            ]
            assert sorted(split(store)) == sorted(answers)

    def test_nothing_that_was_cut_short(self) -> None:
        store = LookupStore()

        def fail(ids: torch.Tensor, scores: Any) -> Any:
            if ids.shape[1] > 16:
                raise RuntimeError("enough")
            return False

        with pytest.raises(RuntimeError, match="enough"):
            generate(inputs(), spec_strategy="lookup", assistant=store, stopping_criteria=[fail])
        assert len(store) == 0
        prompts = inputs("one")["input_ids"].tolist()
        iterator = build("llama").generate_batch_iter(
            prompts * 2, spec_strategy="lookup", assistant=store, max_batch=1, max_new_tokens=4
        )
        next(iterator)
        iterator.close()
        assert len(split(store)) == 1

    def test_a_sequence_that_fails_is_not_stored(self) -> None:
        store = LookupStore()
        good, bad = inputs("one")["input_ids"][0].tolist(), [5, 6, 7]

        def fail(ids: torch.Tensor, scores: Any) -> Any:
            if ids[0, : len(bad)].tolist() == bad and ids.shape[1] > len(bad) + 2:
                raise RuntimeError("enough")
            return torch.zeros(len(ids), dtype=torch.bool)

        call = {"spec_strategy": "lookup", "assistant": store, "stopping_criteria": [fail]}
        outputs = build("llama").generate_batch([bad, good], max_new_tokens=8, **call)
        assert [output.error is None for output in outputs.values()] == [False, True]
        assert len(outputs["req_0"].generated_tokens) >= 1
        (answer,) = stored(store)
        assert answer[: len(good)] == good

    def test_a_canceled_request_is_not_stored(self) -> None:
        store = LookupStore()
        own = OpenGeneration(build("llama"), LookupConfig(), store, None)
        batch = own.make_batch(2, lambda name, tokens: None)
        for number, (name, length) in enumerate((("stays", 6), ("goes", 60))):
            ready = own.prepare(name, PROMPTS[number], greedy(length))
            batch.add(ready.request, ready.prepared)
        with batch.active():
            batch.step()
            assert batch.cancel("goes") is not None
            while batch.unfinished:
                batch.step()
        (answer,) = stored(store)
        assert answer[: len(PROMPTS[0])] == PROMPTS[0]

    def test_a_bounded_store_stays_bounded(self) -> None:
        store = LookupStore(50)
        for seed in range(3):
            given = inputs("one", seed)
            found = generate(given, spec_strategy="lookup", assistant=store).sequences
            assert torch.equal(found, generate(given).sequences)
            assert len(store) <= 50


class TestTheModelsOwn:
    @pytest.mark.parametrize(
        "config",
        [LookupConfig(across_answers=True), AutoConfig(across_answers=True, timings=TIMINGS)],
    )
    def test_a_model_keeps_its_answers(self, config: Any) -> None:
        model = copy.deepcopy(build("llama"))
        given = {**inputs("one"), "max_new_tokens": NEW, "return_dict_in_generate": True}
        first, second = (model.generate(**given, spec_strategy=config) for _ in range(2))
        assert torch.equal(first.sequences, second.sequences)
        assert second.spec_stats.target_forwards < first.spec_stats.target_forwards
        # Each model has its own store; without the option there is none.
        other = copy.deepcopy(model).generate(**given, spec_strategy=config)
        assert other.spec_stats.target_forwards == first.spec_stats.target_forwards
        off = model.generate(**given, spec_strategy="lookup")
        assert off.spec_stats.target_forwards >= first.spec_stats.target_forwards

    def test_a_new_vocabulary_is_a_new_store(self) -> None:
        model = copy.deepcopy(build("llama"))
        config = LookupConfig(across_answers=True)
        model.generate(**inputs("one"), max_new_tokens=4, spec_strategy=config)
        model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
        model.generate(**inputs("one"), max_new_tokens=4, spec_strategy=config)


class TestRefusals:
    def test_another_vocabulary(self) -> None:
        store = LookupStore()
        generate(inputs(), spec_strategy="lookup", assistant=store)
        small = {"input_ids": torch.tensor([[1, 2, 3]])}
        with pytest.raises(OptionError, match="vocabulary of 97 tokens, but the model has 8"):
            tiny(0).generate(**small, max_new_tokens=2, spec_strategy="lookup", assistant=store)

    def test_two_stores(self) -> None:
        with pytest.raises(AssistantError, match="2 LookupStores"):
            generate(inputs(), spec_strategy="auto", assistant=[LookupStore(), LookupStore()])

    def test_a_flag_that_is_none(self) -> None:
        for config in (LookupConfig, AutoConfig):
            with pytest.raises(OptionError, match="across_answers=1 must be True or False"):
                config(across_answers=1)


def test_auto_uses_it_beside_a_draft_model() -> None:
    store, given = LookupStore(), inputs("one")
    assistant = [draft_model("llama"), store]
    for _ in range(2):
        output = generate(given, spec_strategy=CONFIGS["auto"], assistant=assistant)
        assert torch.equal(output.sequences, generate(given).sequences)
    assert "asked_tree" in output.spec_stats.counters
    assert len(split(store)) == 2


def test_sampling_keeps_its_distribution() -> None:
    """Every call adds answers to the store, and later calls copy from them."""
    store, drawn = LookupStore(500), []
    torch.manual_seed(5)
    for _ in range(6):
        output = tiny(0).generate(
            torch.tensor([REPETITIVE]),
            do_sample=True,
            top_k=0,
            max_new_tokens=3,
            num_return_sequences=100,
            spec_strategy=CONFIGS["fixed"],
            assistant=store,
        )
        drawn.append(output[:, len(REPETITIVE) :])
    assert p_value(torch.cat(drawn), exact(REPETITIVE, {}, None)) > ALPHA


def test_threads_share_a_store() -> None:
    store, given = LookupStore(200), [inputs("one", seed) for seed in range(3)]
    plain = [generate(one).sequences for one in given]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(3):
            output = generate(given[number], spec_strategy=CONFIGS["fixed"], assistant=store)
            if not torch.equal(output.sequences, plain[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < len(store) <= 200


def split(store: LookupStore) -> list[list[int]]:
    """Return the answers in a store, each with its separator."""
    return [[*answer, SEPARATOR] for answer in stored(store)]
