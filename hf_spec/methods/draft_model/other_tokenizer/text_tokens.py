"""Text and token ids, one tokenizer in both directions, for texts that grow a piece at a time.

Decoders and encoders treat the beginning of a text otherwise than its middle, so pieces are decoded
and encoded with some of what stands before them. What comes out may differ from the whole text's
in rare places; drafts are made of it, never output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import PADDED_ROWS

# Tokens that are decoded, and characters that are encoded, in front of a piece.
CONTEXT_TOKENS, CONTEXT_CHARACTERS = 8, 32
# What a tokenizer writes for bytes that are no whole character.
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """A token of a text, with the characters that it stands for."""

    token: int
    start: int
    end: int


class TextTokens:
    """A tokenizer that belongs to a model with `size` embeddings.

    Errors call it `name`, the argument that it was given as.

    Attributes:
        special: ids of tokens that stand for no text.
        opening: ids that the tokenizer puts before every text.
    """

    def __init__(self, tokenizer: Any, size: int, name: str):
        if not getattr(tokenizer, "is_fast", False):
            raise OptionError(
                f"{name}= of type {type(tokenizer).__name__} does not say which characters a token "
                "stands for; pass a fast tokenizer, as AutoTokenizer loads it"
            )
        # Rows of an embedding are rounded up, and some tokenizers know a token more than a model.
        if abs(len(tokenizer) - size) > max(PADDED_ROWS, size // 8):
            raise OptionError(
                f"{name}= has {len(tokenizer)} tokens and its model {size}; pass the tokenizer "
                "that belongs to the model"
            )
        self.tokenizer = tokenizer
        self.size = size
        added = tokenizer.added_tokens_decoder.items()
        self.special = {*tokenizer.all_special_ids, *(token for token, one in added if one.special)}
        plain = self._encode(["a"], False)["input_ids"][0]
        framed = self._encode(["a"], True)["input_ids"][0]
        added_around = framed[: len(framed) - len(plain)]
        self.opening: list[int] = list(takewhile(self.special.__contains__, added_around))

    @cached_property
    def letter(self) -> int | None:
        """A token that stands for a letter; None if the tokenizer has none for it."""
        pieces = self.encode("a")
        return pieces[-1].token if pieces else None

    def encode(self, text: str) -> list[Piece]:
        """The tokens of `text`, of those that the model has."""
        return self.encode_all([text])[0] if text else []

    def encode_all(self, texts: Sequence[str]) -> list[list[Piece]]:
        """The same of several texts, none of them empty."""
        if not texts:
            return []
        found = self._encode(texts, False)
        return [
            [
                Piece(token, *span)
                for token, span in zip(ids, spans, strict=True)
                if token < self.size
            ]
            for ids, spans in zip(found["input_ids"], found["offset_mapping"], strict=True)
        ]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, as at the beginning of a text; special ones have none."""
        return str(self.tokenizer.backend_tokenizer.decode(list(tokens)))

    def decode_all(self, texts: list[list[int]]) -> list[str]:
        """The same of many texts at once."""
        # In one call of compiled code: a vocabulary may have a quarter of a million tokens.
        found: list[str] = self.tokenizer.backend_tokenizer.decode_batch(texts)
        return found

    def go_on(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """The text of `tokens` after other ones."""
        return self.go_on_all(before, [tokens])[0]

    def go_on_all(self, before: Sequence[int], stretches: Sequence[Sequence[int]]) -> list[str]:
        """The same of several stretches of tokens, each after the same ones."""
        context = before[-CONTEXT_TOKENS:]
        known = self.decode(context)
        texts = [self.decode([*context, *tokens]) for tokens in stretches]
        return [text[common_length(known, text) :] for text in texts]

    def _encode(self, texts: Sequence[str], special: bool) -> Any:
        return self.tokenizer(
            list(texts),
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            padding=False,
            truncation=False,
            verbose=False,
        )


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many elements two sequences have in common at their beginning."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    pairs = enumerate(zip(first, second, strict=False))
    return next(place for place, (a, b) in pairs if a != b)


def context_start(text: str, end: int) -> int:
    """Where to begin encoding for what stands at `end`: in front of a word, where there is one."""
    start = max(0, end - CONTEXT_CHARACTERS)
    space = text.rfind(" ", max(0, start - CONTEXT_CHARACTERS), start)
    return start if space < 0 else space
