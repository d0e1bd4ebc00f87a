"""One tokenizer in both directions, piece by piece."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.methods.draft_model.other_tokenizer.text_tokens import (
    CONTEXT_CHARACTERS,
    TextTokens,
    context_start,
)
from tests.other_tokenizers import KINDS, TEXTS, bpe, unigram, wordpiece


def tokens_of(tokenizer: Any) -> TextTokens:
    return TextTokens(tokenizer, len(tokenizer), "tokenizer")


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_say_which_characters_they_stand_for(kind: str) -> None:
    tokens = tokens_of(KINDS[kind]())
    for text in TEXTS[:3]:
        pieces = tokens.encode(text)
        expected = tokens.tokenizer(text, add_special_tokens=False).input_ids
        assert [piece.token for piece in pieces] == expected
        assert all(0 <= p.start <= p.end <= len(text) for p in pieces)
        assert pieces[-1].end in {len(text.rstrip()), len(text)}


@pytest.mark.parametrize("kind", ["bpe", "unigram", "subset"])
def test_a_text_that_is_decoded_piece_by_piece_is_whole(kind: str) -> None:
    tokens = tokens_of(KINDS[kind]())
    ids = [piece.token for piece in tokens.encode(TEXTS[0])]
    said = "".join(tokens.decode_after(ids[:at], ids[at : at + 3]) for at in range(0, len(ids), 3))
    assert said == tokens.decode(ids)


def test_what_opens_a_text() -> None:
    assert tokens_of(bpe()).prefix_ids == []
    assert tokens_of(unigram()).prefix_ids == [1]
    assert tokens_of(wordpiece()).prefix_ids == [1]


def test_special_tokens_have_no_text() -> None:
    tokens = tokens_of(bpe())
    assert tokens.special_ids == {0, 1, 2, 3}
    assert tokens.decode([3, *(p.token for p in tokens.encode("the fox")), 2]) == "the fox"


def test_tokens_that_the_model_lacks_are_left_out() -> None:
    whole = bpe()
    short = TextTokens(whole, len(whole) - 3, "tokenizer")
    longest = range(len(whole) - 3, len(whole))
    for token in longest:
        pieces = short.encode(whole.decode([token]))
        assert all(piece.token not in longest for piece in pieces)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(OptionError, match="assistant_tokenizer= has 310 tokens and its model 97"):
        TextTokens(bpe(), 97, "assistant_tokenizer")


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(OptionError, match=r"tokenizer= of type Slow .* pass a fast tokenizer"):
        TextTokens(Slow(), 97, "tokenizer")


def test_encoding_begins_in_front_of_a_word() -> None:
    text = "one two " * 20
    start = context_start(text, 100)
    assert text[start] == " "
    assert 100 - 2 * CONTEXT_CHARACTERS <= start <= 100 - CONTEXT_CHARACTERS
    assert context_start(text, 10) == 0
    assert context_start("a" * 100, 100) == 100 - CONTEXT_CHARACTERS
