"""Encoding and decoding in pieces, and tokens of two tokenizers with the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_spec import AssistantError, OptionError
from hf_spec.methods.draft_model.other_tokenizer.tokenizers import (
    CONTEXT_CHARACTERS,
    TextTokens,
    TokenMap,
    context_start,
)
from tests.other_tokenizers import KINDS, TEXTS, bpe, letters, pair, subset, unigram, wordpiece


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


def names(target: Any, draft: Any) -> dict[str, str]:
    found = pair(target, draft).shared.pairs
    return dict(
        zip(
            target.convert_ids_to_tokens(list(found)),
            draft.convert_ids_to_tokens(list(found.values())),
            strict=True,
        )
    )


class TestCommonTokens:
    def test_marks_of_spaces_are_translated(self) -> None:
        found = names(bpe(), unigram())
        assert found["Ġ"] == "▁"
        assert found["Ã©"] == "é"
        assert found["a"] == "a"
        assert found["</s>"] == "<eos>"

    def test_the_inside_of_words_is_translated(self) -> None:
        found = names(bpe(), wordpiece())
        assert found["a"] == "##a"
        assert found["Ġthe"] == "the"

    @pytest.mark.parametrize("target", KINDS)
    @pytest.mark.parametrize("draft", KINDS)
    def test_equal_text_everywhere(self, target: str, draft: str) -> None:
        if target == draft:
            return
        ours, theirs = KINDS[target](), KINDS[draft]()
        both = pair(ours, theirs)
        for a, b in both.shared.pairs.items():
            if a not in both.special_ids:
                sides = (both.target, a), (both.draft, b)
                said = [
                    side.decode_after([side.encode("a")[-1].token], [token])
                    for side, token in sides
                ]
                assert said[0] == said[1]

    def test_a_part_of_a_vocabulary_is_common_as_a_whole(self) -> None:
        found = names(bpe(), subset())
        assert set(found) == set(found.values()) == set(subset().get_vocab())

    def test_bytes_of_characters_are_those_of_the_same_name(self) -> None:
        def with_bytes(*words: str) -> PreTrainedTokenizerFast:
            vocab = {name: at for at, name in enumerate(["<unk>", *words])}
            made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
            made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
            return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")

        found = names(
            with_bytes("a", "<0xC3>", "<0x41>", "b"), with_bytes("<0x41>", "b", "a", "<0xC3>")
        )
        assert found == {name: name for name in ("a", "<0xC3>", "<0x41>", "b", "<unk>")}

    def test_nothing_in_common(self) -> None:
        both = pair(letters("a", "b"), letters("c", "d"))
        with pytest.raises(AssistantError, match="no token in common; use translation='text'"):
            _ = both.shared


def test_how_much_of_the_target_is_covered() -> None:
    assert pair(subset(), bpe()).coverage == pytest.approx((280 - 4) / 280)
    assert pair(bpe(), unigram()).coverage < 0.2


class TestSame:
    def test_one_vocabulary(self) -> None:
        assert pair(bpe(), bpe()).identical

    @pytest.mark.parametrize("draft", [unigram, wordpiece, subset])
    def test_two(self, draft: Any) -> None:
        assert not pair(bpe(), draft()).identical


def test_logits_are_put_where_the_target_has_the_token() -> None:
    common = TokenMap({4: 0, 1: 2}, 6)
    spread = common.to_target_logits(
        torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.bfloat16)
    )
    no = float("-inf")
    assert spread.tolist() == [[no, 3.0, no, no, 1.0, no], [no, 6.0, no, no, 4.0, no]]
    assert spread.dtype == torch.bfloat16
