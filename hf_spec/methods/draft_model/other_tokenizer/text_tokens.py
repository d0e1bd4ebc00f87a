"""A tokenizer in both directions, for texts that grow piece by piece.

Tokenizers treat the beginning of a text differently from its middle. So pieces are decoded and
encoded with some context in front. In rare cases the result differs from that of the whole text; it
is used for drafts, never for output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import PADDED_ROWS

# Tokens of context when decoding, and characters of context when encoding.
CONTEXT_TOKENS, CONTEXT_CHARACTERS = 8, 32
# Decoders return this for bytes that are not a whole character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TokenSpan:
    """A token of a text and its character range [start, end)."""

    token: int
    start: int
    end: int


class TextTokens:
    """Tokenizer of a model.

    Args:
        tokenizer: a fast tokenizer.
        size: number of embeddings of the model.
        name: argument name of the tokenizer, for error messages.

    Attributes:
        special_ids: ids of tokens without text.
        prefix_ids: ids that the tokenizer adds in front of every text.

    Raises:
        OptionError: if the tokenizer is not a fast one, or does not fit the model.
    """

    def __init__(self, tokenizer: Any, size: int, name: str):
        if not getattr(tokenizer, "is_fast", False):
            raise OptionError(
                f"{name}= of type {type(tokenizer).__name__} does not provide the character ranges "
                "of tokens; pass a fast tokenizer, as AutoTokenizer loads it"
            )
        # Embeddings may be padded, and some tokenizers have a token more than the model.
        if abs(len(tokenizer) - size) > max(PADDED_ROWS, size // 8):
            raise OptionError(
                f"{name}= has {len(tokenizer)} tokens and its model {size}; pass the tokenizer "
                "of the model"
            )
        self.tokenizer = tokenizer
        self.size = size
        extra = tokenizer.added_tokens_decoder.items()
        self.special_ids = {
            *tokenizer.all_special_ids,
            *(token for token, added in extra if added.special),
        }
        plain = self._encode(["a"], False)["input_ids"][0]
        framed = self._encode(["a"], True)["input_ids"][0]
        added_around = framed[: len(framed) - len(plain)]
        self.prefix_ids: list[int] = list(takewhile(self.special_ids.__contains__, added_around))

    @cached_property
    def letter_id(self) -> int | None:
        """Id of a token that ends in a letter; None if the tokenizer has none."""
        spans = self.encode("a")
        return spans[-1].token if spans else None

    def encode(self, text: str) -> list[TokenSpan]:
        """Return the tokens of `text`, without those that the model lacks."""
        return self.encode_all([text])[0] if text else []

    def encode_all(self, texts: Sequence[str]) -> list[list[TokenSpan]]:
        """Encode several non-empty texts, see `encode`."""
        if not texts:
            return []
        encoded = self._encode(texts, False)
        return [
            [
                TokenSpan(token, *span)
                for token, span in zip(ids, spans, strict=True)
                if token < self.size
            ]
            for ids, spans in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens at the beginning of a text, without special tokens."""
        return str(self.tokenizer.backend_tokenizer.decode(list(tokens)))

    def decode_all(self, sequences: list[list[int]]) -> list[str]:
        """Decode many token sequences in one call, see `decode`."""
        # A single call into compiled code: a vocabulary may have 250,000 tokens.
        texts: list[str] = self.tokenizer.backend_tokenizer.decode_batch(sequences)
        return texts

    def decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of `tokens` after the tokens `before`."""
        return self.decode_all_after(before, [tokens])[0]

    def decode_all_after(
        self, before: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return the text of each continuation after the tokens `before`."""
        context = before[-CONTEXT_TOKENS:]
        context_text = self.decode(context)
        texts = [self.decode([*context, *tokens]) for tokens in continuations]
        return [text[common_length(context_text, text) :] for text in texts]

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
    """Return the length of the longest common prefix of two sequences."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    pairs = enumerate(zip(first, second, strict=False))
    return next(index for index, (a, b) in pairs if a != b)


def context_start(text: str, end: int) -> int:
    """Return where to begin encoding to get the tokens at `end`: before a word if possible."""
    start = max(0, end - CONTEXT_CHARACTERS)
    space = text.rfind(" ", max(0, start - CONTEXT_CHARACTERS), start)
    return start if space < 0 else space
