"""Two vocabularies, and the tokens that represent the same text in both.

Tokenizers write the same text differently: the space before a word is "Ġ", "▁" or implicit, in
which case the inside of words is marked. So tokens are compared by their decoded text after a
letter. Parts of characters have no text and are compared by name. TLI compares names only (Timor et
al. 2025, arXiv 2502.05202).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_spec.common.errors import AssistantError
from hf_spec.methods.draft_model.other_tokenizer.text_tokens import REPLACEMENT, TextTokens


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
        """The tokens of both vocabularies.

        Raises:
            AssistantError: if there are none.
        """
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

    Attributes:
        pairs: target id -> draft id.
        size: V, the target's vocabulary size.
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
    if tokens.letter_id is None:
        return {}
    names = tokens.tokenizer.convert_ids_to_tokens(range(min(len(tokens.tokenizer), tokens.size)))
    letter = tokens.decode([tokens.letter_id])
    with_text = [
        token
        for token, name in enumerate(names)
        if name is not None and token not in tokens.special_ids and not _is_byte(name)
    ]
    texts = tokens.decode_all([[tokens.letter_id, token] for token in with_text])
    ids: dict[str, int] = {}
    for token, text in zip(with_text, texts, strict=True):
        own_text = text[len(letter) :] if text.startswith(letter) else ""
        key = REPLACEMENT + names[token] if REPLACEMENT in own_text else own_text
        if key:
            # Of several tokens with the same text the first is the usual one.
            ids.setdefault(key, token)
    for token, name in enumerate(names):
        if name is not None and _is_byte(name):
            ids.setdefault(REPLACEMENT + name, token)
    return ids


def _is_byte(name: str) -> bool:
    """Return True for the name of a byte token of SentencePiece, such as <0x0A>."""
    return len(name) == len("<0x0A>") and name.startswith("<0x") and name.endswith(">")
