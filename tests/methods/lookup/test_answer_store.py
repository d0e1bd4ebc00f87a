"""The store of earlier answers and drafts from it, against a slow reference."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from hf_spec import LookupStore, OptionError
from hf_spec.methods.lookup.answer_store import (
    LONGEST_MATCH,
    MIN_PROBABILITY,
    SEPARATOR,
    StoredDraft,
    find_draft,
)


def stored(store: LookupStore) -> list[list[int]]:
    """The answers in a store, oldest first."""
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
    """The same by counting in lists."""
    best = StoredDraft([], [], [])
    for length in range(min_match, min(len(last), LONGEST_MATCH) + 1):
        rests = [
            answer[end:]
            for answer in answers
            for end in range(length, len(answer))
            if answer[end - length : end] == last[-length:]
        ]
        made = draft(rests, min(max_nodes, length), max_depth)
        # Where a longer match is at the same places, only that counts.
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
            # Equally probable nodes may come in any order.
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
