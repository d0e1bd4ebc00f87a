"""Infilling formats: both orders, the complete text, and the tokenizer's markers."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from hf_spec import OptionError
from hf_spec.methods.sdsat.infilling import MARKERS, Infilling

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(markers: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per letter, then the markers."""
    vocab = {word: index for index, word in enumerate([*LETTERS, *markers])}
    backend = Tokenizer(WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=list(markers)
    )


@pytest.mark.parametrize("markers", MARKERS, ids=lambda names: names[0])
def test_the_tokenizer_says_what_its_markers_are(markers: tuple[str, str, str]) -> None:
    infilling = Infilling.of(letters(markers))
    assert (infilling.prefix, infilling.suffix, infilling.middle) == (26, 27, 28)
    assert infilling.markers == {26, 27, 28}


def test_a_tokenizer_without_them_is_refused() -> None:
    with pytest.raises(OptionError, match="no infilling tokens such as <fim_prefix>"):
        Infilling.of(letters())


def test_markers_that_are_named() -> None:
    tokenizer = letters(("<a>", "<b>", "<c>", *MARKERS[0]))
    infilling = Infilling.of(tokenizer, ("<c>", "<a>", "<b>"))
    assert (infilling.prefix, infilling.suffix, infilling.middle) == (28, 26, 27)
    with pytest.raises(OptionError, match="'<d>' is not in the tokenizer"):
        Infilling.of(tokenizer, ("<a>", "<b>", "<d>"))


def test_the_end_token_stays_whole_and_last() -> None:
    infilling = Infilling.of(letters((*MARKERS[0], "<end>")))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        found = infilling.arrange([*range(10), 29], generator)
        assert found[-1] == 29
        assert sorted(found) == [*range(10), 26, 27, 28, 29]


def test_both_orders_hold_the_whole_text() -> None:
    infilling = Infilling.of(letters(MARKERS[0]))
    text = list(range(10))
    generator = torch.Generator().manual_seed(0)
    orders = {"psm": 0, "spm": 0}
    for _ in range(400):
        found = infilling.arrange(text, generator)
        assert found[0] == 26
        suffix, middle = found.index(27), found.index(28)
        if suffix == 1 and found[2:middle] and found[2] != 0:
            orders["spm"] += 1
            assert found[middle + 1 :] + found[2:middle] == text
        elif suffix > 1:
            orders["psm"] += 1
            prefix, between, after = (
                found[1:suffix],
                found[middle + 1 :],
                found[suffix + 1 : middle],
            )
            assert prefix + between + after == text
    # Texts with an empty part look the same in both orders and are not counted.
    assert min(orders.values()) > 100
