"""A tokenizer in both directions, for texts that grow piece by piece; and two vocabularies.

Tokenizers treat the beginning of a text differently from its middle. So pieces are decoded and
encoded with some context in front. In rare cases the result differs from that of the whole text; it
is used for drafts, never for output.

Vocabularies write the same text differently: the space before a word is "Ġ", "▁" or implicit, in
which case the inside of words is marked. So tokens are compared by their decoded text after a
letter. Parts of characters have no text and are compared by name. TLI compares names only (Timor et
al. 2025, arXiv 2502.05202).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from hf_spec.common.errors import AssistantError, OptionError
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
    """Tokenizer of a model with `size` embeddings; `name` is its argument name for messages.

    Attributes:
        special_ids: ids of tokens without text.
        prefix_ids: ids that the tokenizer adds in front of every text.
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
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = {*tokenizer.all_special_ids, *(t for t, kind in added if kind.special)}
        plain = self._encode(["a"], False)["input_ids"][0]
        framed = self._encode(["a"], True)["input_ids"][0]
        added_around = framed[: len(framed) - len(plain)]
        self.prefix_ids: list[int] = list(takewhile(self.special_ids.__contains__, added_around))

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


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """The tokenizers of target and draft model."""

    target: TextTokens
    draft: TextTokens

    @property
    def identical(self) -> bool:
        """True if both vocabularies have the same ids."""
        target, draft = self.target.tokenizer, self.draft.tokenizer
        return len(target) == len(draft) and target.get_vocab() == draft.get_vocab()

    @cached_property
    def special_ids(self) -> dict[int, int]:
        """Target id -> draft id of special tokens with the same name, and of the EOS tokens."""
        draft_ids = {
            self.draft.tokenizer.convert_ids_to_tokens(t): t for t in self.draft.special_ids
        }
        pairs = {}
        for token in sorted(self.target.special_ids):
            name = self.target.tokenizer.convert_ids_to_tokens(token)
            if name in draft_ids:
                pairs[token] = draft_ids[name]
        eos = self.target.tokenizer.eos_token_id, self.draft.tokenizer.eos_token_id
        if None not in eos:
            pairs[eos[0]] = eos[1]
        return {a: b for a, b in pairs.items() if a < self.target.size and b < self.draft.size}

    @property
    def coverage(self) -> float:
        """Share of the target's tokens that the draft model also has."""
        return len(self._same_text) / len(self.target.tokenizer)

    @cached_property
    def shared(self) -> TokenMap:
        """The tokens of both vocabularies; raises `AssistantError` if there are none."""
        if not self._same_text:
            raise AssistantError(
                "the tokenizers of target and draft model have no token in common; use "
                "translation='text'"
            )
        return TokenMap({**self._same_text, **self.special_ids}, self.target.size)

    @cached_property
    def _same_text(self) -> dict[int, int]:
        """Target id -> draft id of tokens with the same text."""
        draft, target = _ids_by_text(self.draft), _ids_by_text(self.target)
        return {token: draft[text] for text, token in target.items() if text in draft}


class TokenMap:
    """Map between the shared tokens of two vocabularies.

    `pairs` is target id -> draft id; `size` is V, the target's vocabulary size.
    """

    def __init__(self, pairs: dict[int, int], size: int):
        self.pairs = pairs
        self.size = size
        self._ids = torch.tensor([list(pairs), list(pairs.values())])

    def to_draft(self, token: int) -> int:
        """Return the draft model's id of a target token; 0 if it is not shared."""
        return self.pairs.get(token, 0)

    def to_target_logits(self, logits: Tensor) -> Tensor:
        """Return (..., V) logits over the target's tokens, -inf where they are not shared."""
        if self._ids.device != logits.device:
            self._ids = self._ids.to(logits.device)
        target_ids, draft_ids = self._ids
        spread = logits.new_full((*logits.shape[:-1], self.size), float("-inf"))
        spread[..., target_ids] = logits[..., draft_ids]
        return spread


def _ids_by_text(tokens: TextTokens) -> dict[str, int]:
    """Return decoded text after a letter -> id; parts of characters by their marked name."""
    spans = tokens.encode("a")
    if not spans:
        return {}
    letter_id = spans[-1].token
    letter = tokens.decode([letter_id])
    names = tokens.tokenizer.convert_ids_to_tokens(range(min(len(tokens.tokenizer), tokens.size)))
    with_text = [
        token
        for token, name in enumerate(names)
        if name is not None and token not in tokens.special_ids and not _is_byte(name)
    ]
    # A single call into compiled code: a vocabulary may have 250,000 tokens.
    pairs = [[letter_id, token] for token in with_text]
    texts = tokens.tokenizer.backend_tokenizer.decode_batch(pairs)
    ids: dict[str, int] = {}
    for token, text in zip(with_text, texts, strict=True):
        own_text = text[len(letter) :] if text.startswith(letter) else ""
        key = REPLACEMENT + names[token] if REPLACEMENT in own_text else own_text
        if key:
            # The first of several tokens with the same text is the usual one.
            ids.setdefault(key, token)
    for token, name in enumerate(names):
        if name is not None and _is_byte(name):
            ids.setdefault(REPLACEMENT + name, token)
    return ids


def _is_byte(name: str) -> bool:
    """Return True for the name of a byte token of SentencePiece, such as <0x0A>."""
    return len(name) == len("<0x0A>") and name.startswith("<0x") and name.endswith(">")
