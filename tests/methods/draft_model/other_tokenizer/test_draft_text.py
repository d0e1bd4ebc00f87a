"""Translation of a growing target sequence into the draft model's tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hf_spec.methods.draft_model.other_tokenizer.draft_text import MOST_INCOMPLETE, DraftText
from tests.other_tokenizers import KINDS, SENTENCE, TEXTS, bpe, pair, subset, unigram, wordpiece


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


@pytest.mark.parametrize("draft", ["unigram", "wordpiece", "subset"])
@pytest.mark.parametrize("text", [SENTENCE * 5, TEXTS[1], TEXTS[1] * 4])
def test_however_it_grows_it_is_what_encoding_it_at_once_gives(draft: str, text: str) -> None:
    """The target has tokens of one byte, which split characters."""
    target, other = subset(), KINDS[draft]()
    both = pair(bpe() if draft == "subset" else target, other)
    tokens = ids(both.target.tokenizer, text)
    generator = random.Random(0)
    for most in (1, 3, 40):
        grown, read = DraftText(both), 0
        while read < len(tokens):
            read += generator.randint(1, most)
            found = grown.read(tokens[:read])
            assert text.startswith(grown.text)
        assert grown.text == text
        assert found == [*both.draft.prefix_ids, *ids(other, text)]


def test_parts_of_a_character_wait() -> None:
    both = pair(subset(), unigram())
    before, parts = ids(subset(), "the"), ids(subset(), "🙂")
    assert len(parts) > 2
    text = DraftText(both)
    for read in range(1, len(parts)):
        assert text.read([*before, *parts[:read]]) == [1, *ids(unigram(), "the")]
        assert text.incomplete == parts[:read]
    assert text.read([*before, *parts]) == [1, *ids(unigram(), "the🙂")]
    assert text.incomplete == []


def test_bytes_that_are_no_character_do_not_wait_for_ever() -> None:
    both = pair(subset(), wordpiece())
    lone = ids(subset(), "🙂")[0]
    text = DraftText(both)
    for length in range(1, 40):
        text.read([lone] * length)
        assert len(text.incomplete) <= MOST_INCOMPLETE
    text.read([lone] * 39 + ids(subset(), " the fox"))
    assert text.text.endswith(" the fox")


class TestSpecialTokens:
    def test_ends_are_translated_and_others_dropped(self) -> None:
        both = pair(bpe(), unigram())
        tokens = [3, *ids(bpe(), "the fox"), 2, 3, *ids(bpe(), "the dog")]
        expected = [1, *ids(unigram(), "the fox"), 2, *ids(unigram(), "the dog")]
        assert DraftText(both).read(tokens) == expected

    def test_no_text_opens_twice(self) -> None:
        both = pair(unigram(), unigram(80))
        assert both.special_ids[1] == 1
        assert DraftText(both).read([1, *ids(unigram(), "the fox")])[:2] != [1, 1]

    def test_the_same_token_by_token(self) -> None:
        both = pair(bpe(), unigram())
        tokens = [3, *ids(bpe(), "the fox"), 2, 3, *ids(bpe(), " the dog, é")]
        grown = DraftText(both)
        for read in range(1, len(tokens) + 1):
            found = grown.read(tokens[:read])
        assert found == DraftText(both).read(tokens)


def test_only_the_end_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(bpe(), unigram())
    tokens = ids(bpe(), SENTENCE * 20)
    text = DraftText(both)
    text.read(tokens[:-5])
    seen: list[str] = []
    encode = both.draft.encode
    monkeypatch.setattr(both.draft, "encode", lambda text: seen.append(text) or encode(text))
    for read in range(len(tokens) - 4, len(tokens) + 1):
        text.read(tokens[:read])
    assert seen
    assert max(map(len, seen)) < 200
