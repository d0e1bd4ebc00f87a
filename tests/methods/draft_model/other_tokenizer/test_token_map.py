"""Tokens of two vocabularies with the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_spec import AssistantError
from hf_spec.methods.draft_model.other_tokenizer.token_map import TokenMap
from tests.other_tokenizers import KINDS, bpe, letters, pair, subset, unigram, wordpiece


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
                said = [side.decode_after([side.letter_id], [token]) for side, token in sides]
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
